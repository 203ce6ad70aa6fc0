"""What a pod concludes from slurmctld's words about its node."""

from __future__ import annotations

import pytest

from init.drain import budget
from init.slurm_client import judge
from init.slurm_node import FRESH, STOPPING, Node, fresh_updates, parse, unproven
from init.stop import drain_budget, margin
from tests.unit.test_init_services import plan_of

LINE = (
    "NodeName=w1 Arch=x86_64 CoresPerSocket=2  CPUAlloc=1 CPUEfctv=2 CPUTot=2 CPULoad=0.00 AvailableFeatures=minivm "
    "Gres=(null) NodeAddr=172.18.0.3 NodeHostName=w1 Version=24.11.5 OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=24105 State=MIXED+DRAIN+DYNAMIC_NORM+NOT_RESPONDING ThreadsPerCore=1 Partitions=main  "
    "BootTime=2026-11-20T10:08:50 SlurmdStartTime=2026-11-20T10:25:01 LastBusyTime=2026-11-20T10:25:01 "
    "CfgTRES=cpu=2,mem=24105M,billing=2 AllocTRES= CurrentWatts=0  Reason=my own reason x=1 [root@2026-11-20T10:32:18]"
)


def test_a_nodes_line_is_read_whole() -> None:
    node = parse(LINE)
    assert node == Node(
        "w1", "MIXED+DRAIN+DYNAMIC_NORM+NOT_RESPONDING", "172.18.0.3", "my own reason x=1", "2026-11-20T10:25:01", 1
    )
    assert node.dynamic and node.busy and not node.responds and node.drained_by_others


def node(state: str = "IDLE+DYNAMIC_NORM", *, address: str = "10.0.0.1", reason: str = "", busy: int = 0) -> Node:
    return Node("w1", state, address, reason, "2026-01-01T00:00:00", busy)


DOWN = ["state=down", f"reason={FRESH}"]


@pytest.mark.parametrize(
    ("found", "address", "updates"),
    [
        (node(), "10.0.0.1", []),
        (node(), "10.0.0.2", []),  # a dynamic node registers its new address itself
        (node("IDLE"), "10.0.0.2", [DOWN, ["nodeaddr=10.0.0.2"], ["state=resume"]]),
        (node("MIXED+DYNAMIC_NORM", busy=1), "10.0.0.1", [DOWN, ["state=resume"]]),  # its jobs are ghosts
        (
            node("MIXED+DRAIN", reason="fan is loud", busy=1),
            "10.0.0.1",
            [DOWN, ["state=resume"], ["state=drain", "reason=fan is loud"]],
        ),
        (node("IDLE+DRAIN", reason="fan is loud"), "10.0.0.1", []),
        (node("IDLE+DRAIN", reason=STOPPING), "10.0.0.1", [["state=resume"]]),
        (node("DOWN", reason=STOPPING), "10.0.0.1", [["state=resume"]]),
        (node("IDLE+DRAIN", reason="minivm: gpu_count: 7 of 8"), "10.0.0.1", []),  # a verdict's, the broker's to lift
    ],
)
def test_a_fresh_pod_tells_what_changed_and_lifts_only_its_own(
    found: Node, address: str, updates: list[list[str]]
) -> None:
    assert fresh_updates(found, address) == updates


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "knows no node w1"),
        (Node("w1", "UNKNOWN", "10.0.0.1", "", "None", 0), "not registered"),
        (node("IDLE*"), "gets no answer from w1 at 10.0.0.1"),
        (node("IDLE+NOT_RESPONDING"), "gets no answer"),
        (node(address="10.0.0.9"), "believes w1 to be at 10.0.0.9, and it is at 10.0.0.1"),
        (node("DOWN", reason="Not responding"), "down in Slurm: Not responding"),
        (node("IDLE+DRAIN", reason="fan"), ""),  # drained is known: the pod is ready, the node is not offered
        (node(address="w1.site"), ""),
        (node(), ""),
    ],
)
def test_what_is_not_proven_is_said(found: Node | None, why: str) -> None:
    text = unproven(found, "w1", ["10.0.0.1"])
    assert text == "" if not why else why in text


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "sinfo: error: _fetch_child: failed to fetch remote configs: Protocol authentication error",
            "munge key rejected",
        ),
        (
            "error: Munge encode failed: Failed to access socket\nslurm: Protocol authentication error",
            "munged does not",
        ),
        ("error: getaddrinfo() failed: Name or service not known", "does not resolve"),
        ("slurm_load_node error: Unable to contact slurm controller (connect failure)", "cannot be reached"),
        ("slurm_update error: Invalid node name specified", "Invalid node name specified"),
        ("", "said nothing"),
    ],
)
def test_a_clients_complaint_is_put_into_plain_words(said: str, meaning: str) -> None:
    assert meaning in judge(said, "slurm-controller:6817")


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, 13.0),  # half of what 30 s of grace leave
        ({"MINIVM_GRACE_SECONDS": "soon"}, 13.0),
        ({"MINIVM_GRACE_SECONDS": "300"}, 147.0),
        ({"MINIVM_GRACE_SECONDS": "300", "MINIVM_DRAIN_SECONDS": "120"}, 120.0),
        ({"MINIVM_DRAIN_SECONDS": "120"}, 13.0),
        ({"MINIVM_GRACE_SECONDS": "1"}, 0.0),
    ],
)
def test_a_drain_ends_before_pid_1_would_end_it(env: dict[str, str], seconds: float) -> None:
    assert budget(env, lambda total: total / 2) == pytest.approx(seconds)


def test_the_drain_of_a_worker_gets_what_a_long_grace_leaves() -> None:
    plan = plan_of("worker")
    assert plan.drain is not None
    most = drain_budget(plan.drain, plan.services, 3600 - margin(3600))
    assert budget({"MINIVM_GRACE_SECONDS": "3600"}, lambda total: most) > 3500
