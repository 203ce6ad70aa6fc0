"""Two releases on one cluster, by Helm before a real API server: what one fleet has another one does not take."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from cluster.render import CHART
from tests.helm import helm, rendered_for
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


def scaled(name: str, to: int) -> tuple[str, ...]:
    return ("-n", f"of-{name}", "scale", f"workerpools.minivm.io/{name}-gpu", f"--replicas={to}")


def kubectl(api: ApiServer, *words: str, stdin: str = "") -> str:
    command = [str(api.programs.bin / "kubectl"), f"--kubeconfig={api.kubeconfig}", *words]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def replicas(api: ApiServer, name: str) -> int:
    found = api.ask("GET", f"/apis/minivm.io/v1alpha1/namespaces/of-{name}/workerpools/{name}-gpu")
    return int(found["spec"]["replicas"])


def test_a_number_that_kubectl_scale_has_set_outlives_upgrades(api: ApiServer) -> None:
    pool: Object = {"kind": "WorkerPool", "replicas": 8, "externalScaling": True}
    said = values() | {"workers": {"pools": {"gpu": pool}}}
    assert says(api, "install", "scaled", said) == ""
    assert replicas(api, "scaled") == 1, "the default of the definition"
    kubectl(api, *scaled("scaled", 5))
    for number in (1, 2):
        pool["podAnnotations"] = {"upgrade": str(number)}
        assert says(api, "upgrade", "scaled", said) == ""
        assert replicas(api, "scaled") == 5


def test_a_pool_whose_number_was_in_the_values_keeps_what_kubectl_scale_set_when_it_is_handed_over(
    api: ApiServer,
) -> None:
    pool: Object = {"kind": "WorkerPool", "replicas": 2}
    said = values() | {"workers": {"pools": {"gpu": pool}}}
    assert says(api, "install", "handed", said) == ""
    kubectl(api, *scaled("handed", 5))
    pool["externalScaling"] = True
    assert says(api, "upgrade", "handed", said) == ""
    assert replicas(api, "handed") == 5


def test_a_render_with_the_fleet_is_applied_and_scaled_and_applied_again_in_a_namespace(api: ApiServer) -> None:
    """As docs/how-to/gitops.md does it, with `-n`."""
    api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "of-git"}})
    pool = {"kind": "WorkerPool", "replicas": 8, "externalScaling": True}
    policy = {"fencing": "act", "cordon": True}
    said = {
        "fleet": {"enabled": True, "workerPools": {"enabled": True}, "machines": {"enabled": True}, "policy": policy},
        "workers": {"pools": {"gpu": pool}},
    }
    texts = rendered_for(api.ask("GET", "/version")["gitVersion"], said, release="git", namespace="of-git")
    text = "\n---\n".join(text for name, text in sorted(texts.items()) if name.endswith(".yaml"))
    applied = ("-n", "of-git", "apply", "--server-side", "-f", "-")
    assert "workerpool.minivm.io/git-gpu" in kubectl(api, *applied, stdin=text)
    assert replicas(api, "git") == 1
    kubectl(api, *scaled("git", 3))
    kubectl(api, *applied, stdin=text)
    assert replicas(api, "git") == 3


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
