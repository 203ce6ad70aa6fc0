"""Two releases on one cluster, by Helm before a real API server: what one fleet has another one does not take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.rendered.render import CHART
from tests.helm import helm
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server

pytestmark = pytest.mark.timeout(3600)

ROLE = "minivm-fleet-guests"
BINDING = f"/apis/rbac.authorization.k8s.io/v1/namespaces/llm/rolebindings/{ROLE}"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("neighbours")) as api:
        for name in ("llm", "other"):
            api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        yield api


def values(*namespaces: str) -> Object:
    lend = {"namespaces": list(namespaces), "classes": ["inference"], "pools": {"gpu": 0.5}} if namespaces else {}
    return {"fleet": {"enabled": True, "workerPools": {"enabled": True}, "policy": {"lend": lend}}}


def says(api: ApiServer, word: str, name: str, said: Object) -> str:
    """Return Helm's refusal, or "" when it succeeds."""
    more = ("--create-namespace",) if word == "install" else ()
    try:
        helm(api.kubeconfig, word, name, str(CHART), "--namespace", f"of-{name}", *more, values=said)
    except AssertionError as error:
        return str(error)
    return ""


def whose(api: ApiServer) -> list[tuple[str, str]]:
    return [(one["namespace"], one["name"]) for one in api.ask("GET", BINDING)["subjects"]]


def test_a_first_install_brings_the_kinds_before_a_pool_and_a_second_release_finds_them(
    api: ApiServer,
) -> None:
    pool = {"workers": {"pools": {"gpu": {"kind": "WorkerPool", "replicas": 2}}}}
    for name, word in (("first", "install"), ("first", "upgrade"), ("next", "install")):
        assert says(api, word, name, values() | pool) == ""
        found = api.ask("GET", f"/apis/minivm.io/v1alpha1/namespaces/of-{name}/workerpools/{name}-gpu")
        assert found["spec"]["replicas"] == 2


def test_who_comes_second_lends_nothing_to_the_same_namespace_and_is_told_whose_it_is(api: ApiServer) -> None:
    """Both would empty a machine for the same pod."""
    assert says(api, "install", "one", values("llm")) == ""
    said = says(api, "install", "two", values("other", "llm"))
    assert "fleet.policy.lend.namespaces: the release one in namespace of-one lends machines to namespace llm" in said
    assert "Take the namespace out of one of the two" in said
    assert whose(api) == [("of-one", "one-fleet")]
    assert says(api, "upgrade", "one", values("llm")) == "", "it is its own"
    # Beside it: another namespace, or none.
    assert says(api, "install", "two", values("other")) == ""
    assert "namespace llm already" in says(api, "upgrade", "two", values("other", "llm"))
    # Given up by the one it is the other's.
    assert says(api, "upgrade", "one", values()) == ""
    assert says(api, "upgrade", "two", values("llm")) == ""
    assert whose(api) == [("of-two", "two-fleet")]


def test_one_that_nobody_could_look_for_is_refused_by_its_name(api: ApiServer) -> None:
    """Of a Role that says no release the chart knows nothing, and Helm takes nothing that is not the release's."""
    where = "/api/v1/namespaces"
    api.ask("POST", where, {"metadata": {"name": "third"}})
    roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/third/roles"
    api.ask("POST", roles, {"metadata": {"name": ROLE}, "rules": []})
    said = says(api, "install", "three", values("third"))
    assert f'Role "{ROLE}" in namespace "third" exists' in said
