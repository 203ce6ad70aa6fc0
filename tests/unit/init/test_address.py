"""The EndpointSlice that leads to the acting controller: what it says, and when it is written, by table."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from init.pod.pod import Pod
from init.state.address import SliceAction, decide, endpoint_slice

ENV = {
    "MINIVM_POD_NAME": "slurm-controller-1",
    "MINIVM_POD_IP": "10.244.1.7",
    "MINIVM_POD_UID": "u1",
    "MINIVM_CONTROLLER": "slurm-slurmctld",
    "MINIVM_HTTP": "0.0.0.0:8650",
}


def wanted(term: int = 3, **env: str) -> dict[str, Any]:
    return endpoint_slice(Pod(ENV | env), term)


def answered(**changes: Any) -> dict[str, Any]:
    """Return the slice as an API server gives it back, with fields of its own."""
    item = deepcopy(wanted())
    item["metadata"] |= {"uid": "s", "resourceVersion": "7", "generation": 2}
    item["endpoints"][0]["conditions"]["serving"] = True
    item["ports"].reverse()
    return item | changes


def test_the_slice_is_the_services_and_its_pod_owns_it() -> None:
    item = wanted(MINIVM_SLURMRESTD="0.0.0.0:6821")
    assert item["metadata"] == {
        "name": "slurm-slurmctld-active",
        "labels": {
            "kubernetes.io/service-name": "slurm-slurmctld", "endpointslice.kubernetes.io/managed-by": "minivm",
        },
        "annotations": {"minivm.io/term": "3"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "slurm-controller-1", "uid": "u1"}],
    }  # fmt: skip
    assert item["addressType"] == "IPv4" and item["endpoints"][0]["addresses"] == ["10.244.1.7"]
    ports = {port["name"]: port["port"] for port in item["ports"]}
    assert ports == {"slurmctld": 6817, "slurmdbd": 6819, "slurmrestd": 6821, "http": 8650}
    assert wanted(MINIVM_POD_IP="fd00::7")["addressType"] == "IPv6"


@pytest.mark.parametrize(
    ("present", "act"),
    [
        (None, SliceAction.WRITE),
        (answered(), SliceAction.KEEP),
        (answered(endpoints=None), SliceAction.WRITE),
        (answered(endpoints=[]), SliceAction.WRITE),
        (
            answered(endpoints=[*wanted()["endpoints"], *wanted(MINIVM_POD_IP="10.9.9.9")["endpoints"]]),
            SliceAction.WRITE,
        ),
        (answered(ports=wanted()["ports"][1:]), SliceAction.WRITE),
        (answered(metadata={}), SliceAction.WRITE),
        (answered(metadata={"annotations": {"minivm.io/term": "2"}}), SliceAction.WRITE),
        (answered(metadata={"annotations": {"minivm.io/term": "four"}}), SliceAction.WRITE),
        (answered(metadata={"annotations": {"minivm.io/term": "4"}}), SliceAction.YIELD),
    ],
)
def test_it_is_written_where_it_does_not_name_this_pod_and_left_to_a_later_term(
    present: dict[str, Any] | None, act: SliceAction
) -> None:
    assert decide(present, wanted()) is act
