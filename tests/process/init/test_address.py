"""The acting controller's EndpointSlice at a real API server, with the rights that the chart gives and no other."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from init.pod.api_server import ApiError
from init.pod.pod import Pod
from init.state.address import SliceAction, Slices, endpoint_slice
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, api_server
from tests.support.rendered_chart import render

pytestmark = pytest.mark.timeout(600)
SPACE = "default"
VALUES = {
    "accounting": {"mode": "none"},
    "controller": {"replicas": 2, "persistence": {"existingClaim": "shared-state"}},
}
KINDS = {"ServiceAccount": "/api/v1/{}/serviceaccounts", "Role": "/apis/rbac.authorization.k8s.io/v1/{}/roles",
         "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}/rolebindings"}  # fmt: skip
NAME = "slurm-slurmctld-active"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built():
        pytest.skip("no API server is built: make kube-up")
    with api_server(programs.build(), tmp_path_factory.mktemp("api")) as server:
        for item in render(VALUES, release="slurm", namespace=SPACE):
            if item["kind"] in KINDS and "controller" in item["metadata"]["name"]:
                server.ask("POST", KINDS[item["kind"]].format(f"namespaces/{SPACE}"), item)
        yield server


@pytest.fixture
def account(api: ApiServer, tmp_path: Path) -> Path:
    """Mounts of a controller's pod."""
    path = f"/api/v1/namespaces/{SPACE}/serviceaccounts/slurm-controller/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": None}}
    (tmp_path / "token").write_text(api.ask("POST", path, body)["status"]["token"])
    (tmp_path / "ca.crt").write_text((api.directory / "certs/apiserver.crt").read_text())
    return tmp_path


def slices(api: ApiServer, account: Path, number: int, term: int, **meta: str) -> Slices:
    env = {
        "MINIVM_POD_NAME": f"slurm-controller-{number}",
        "MINIVM_POD_IP": f"10.244.1.{number + 1}",
        "MINIVM_POD_UID": f"u{number}",
        "MINIVM_CONTROLLER": "slurm-slurmctld",
    }
    wanted = endpoint_slice(Pod(env), term)
    wanted["metadata"] |= meta
    return Slices(SPACE, wanted, account, api.url.removeprefix("https://"))


def present(own: Slices) -> dict[str, Any]:
    found = own.read()
    assert found
    return found


def test_the_newest_term_has_the_address_whatever_the_former_one_does(api: ApiServer, account: Path) -> None:
    first, second = slices(api, account, 0, 1), slices(api, account, 1, 2)
    assert first.read() is None
    assert (first.turn(), first.turn()) == (SliceAction.WRITE, SliceAction.KEEP)
    late = deepcopy(present(first))
    assert (second.turn(), second.turn()) == (SliceAction.WRITE, SliceAction.KEEP)
    found = present(second)
    assert [item["addresses"] for item in found["endpoints"]] == [["10.244.1.2"]]
    assert [item["uid"] for item in found["metadata"]["ownerReferences"]] == ["u1"]
    # A request that the former controller began before it was stopped, and one that it begins when it wakes.
    with pytest.raises(ApiError, match="409"):
        first.write(late)
    with pytest.raises(ApiError, match=f"it has term 2, this pod has term 1.*kubectl delete endpointslice {NAME}"):
        first.turn()
    assert present(second) == found


def test_what_another_client_changed_is_put_right(api: ApiServer, account: Path) -> None:
    own = slices(api, account, 1, 9)
    own.turn()
    api.merge(own.path(), {"endpoints": [], "metadata": {"ownerReferences": []}})
    assert (own.turn(), own.turn()) == (SliceAction.WRITE, SliceAction.KEEP)
    assert present(own)["endpoints"][0]["targetRef"]["name"] == "slurm-controller-1"


def test_no_other_slice_may_be_read_made_or_changed(api: ApiServer, account: Path) -> None:
    other = slices(api, account, 0, 1, name="stolen")
    for attempt in (other.read, lambda: other.write(None)):
        with pytest.raises(ApiError) as error:
            attempt()
        assert error.value.status == 403
    with pytest.raises(ApiError) as error:
        body = {"apiVersion": f"discovery.k8s.io/{other.version()}", **other.wanted}
        other.api.ask("POST", other.path().rpartition("/")[0], body)
    assert error.value.status == 403
