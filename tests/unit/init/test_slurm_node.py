"""Conclusions of a pod from slurmctld's view of its node."""

from __future__ import annotations

import pytest

from init.cli import words
from init.drain.deadline import budget
from init.engine.engine import Engine
from init.engine.machine import Trace
from init.engine.order import ENDING, REQUEUE, drain_budget, kill_margin, read_wished_drain_time
from init.lean import replace
from init.slurm.client import judge
from init.slurm.node import BACK, FRESH, STOPPING, FreshStart, Node, born_held, parse, plan_fresh_start, unproven
from init.slurm.registration import describe_registration, difference
from tests.support.plans import plan_of

LINE = (
    "NodeName=w1 Arch=x86_64 CoresPerSocket=2  CPUAlloc=1 CPUEfctv=2 CPUTot=2 CPULoad=0.00 AvailableFeatures=minivm "
    "Gres=(null) NodeAddr=172.18.0.3 NodeHostName=w1 Version=24.11.5 OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=24105 State=MIXED+DRAIN+DYNAMIC_NORM+NOT_RESPONDING ThreadsPerCore=1 Partitions=main  "
    "BootTime=2026-11-20T10:08:50 SlurmdStartTime=2026-11-20T10:25:01 LastBusyTime=2026-11-20T10:25:01 "
    "CfgTRES=cpu=2,mem=24105M,billing=2 AllocTRES= CurrentWatts=0  Reason=my own reason x=1 [root@2026-11-20T10:32:18]"
)


def test_a_nodes_line_is_read_whole() -> None:
    node = parse(LINE)
    state, author = "MIXED+DRAIN+DYNAMIC_NORM+NOT_RESPONDING", "root@2026-11-20T10:32:18"
    assert replace(node, shown=()) == Node(
        "w1", state, "172.18.0.3", "my own reason x=1", "2026-11-20T10:25:01", 1, author
    )
    assert dict(node.shown)["RealMemory"] == "24105" and dict(node.shown)["AvailableFeatures"] == "minivm"
    assert node.dynamic and node.busy and not node.responds and node.held_by_others


def test_a_reason_that_was_carried_over_tells_its_true_author() -> None:
    node = parse(
        "NodeName=w1 State=IDLE+DRAIN Reason=fan is loud [ann@2026-11-20T10:32:18] [slurm@2026-11-21T00:00:00]"
    )
    assert (node.reason, node.author) == ("fan is loud", "ann@2026-11-20T10:32:18")


@pytest.mark.parametrize(
    ("state", "reason", "holder"),
    [
        ("IDLE+DRAIN", STOPPING, "us"),
        ("DOWN+DRAIN", f"{STOPPING} : Not responding", "us"),
        ("DOWN", FRESH, "us"),
        ("DOWN", "Not responding", ""),
        ("DOWN", f"{BACK} : Not responding", ""),
        ("IDLE", "fan is loud", ""),  # the reason outlived its drain
        ("IDLE+DRAIN", "fan is loud", "others"),
        ("DOWN", "power is off", "others"),
        ("DOWN+DRAIN", "fan is loud : Not responding", "others"),
        ("IDLE+DRAIN", "Not responding", "others"),
        ("IDLE+DRAIN", f"{STOPPING} : Prolog error", "others"),
        ("IDLE+DRAIN", f"{STOPPING} of Ann", "others"),
        ("IDLE+DRAIN", BACK, "others"),  # Slurm's own drain, which keeps the existing reason
        ("IDLE+DRAIN", "minivm: gpu_ecc[rma]@9f2c 3 errors", "others"),
    ],
)
def test_who_holds_a_node(state: str, reason: str, holder: str) -> None:
    found = node(f"{state}+DYNAMIC_NORM", reason=reason)
    assert (found.held_by_us, found.held_by_others) == (holder == "us", holder == "others")


def node(state: str = "IDLE+DYNAMIC_NORM", *, address: str = "10.0.0.1", reason: str = "", busy: int = 0) -> Node:
    return Node("w1", state, address, reason, "2026-01-01T00:00:00", busy)


DOWN = ("state=down", f"reason={FRESH}")
RESUME = ("state=resume", f"reason={BACK}")
FAN = 'State=DRAIN Reason="fan is loud"'


@pytest.mark.parametrize(
    ("found", "address", "expected"),
    [
        (node(), "10.0.0.1", FreshStart()),
        (node(), "10.0.0.2", FreshStart()),  # a dynamic node registers its new address itself
        (node("IDLE"), "10.0.0.2", FreshStart(updates=(DOWN, ("nodeaddr=10.0.0.2",), RESUME))),
        (
            node("MIXED+DYNAMIC_NORM", busy=1),
            "10.0.0.1",
            FreshStart(updates=(DOWN, RESUME)),
        ),  # its jobs no longer exist
        # A node held by others keeps its state and reason at every moment.
        (node("MIXED+DRAIN", reason="fan is loud", busy=1), "10.0.0.1", FreshStart(free_jobs=True)),
        (
            node("MIXED+DRAIN", reason="fan", busy=1),
            "10.0.0.2",
            FreshStart(free_jobs=True, updates=(("nodeaddr=10.0.0.2",),)),
        ),
        (node("IDLE+DRAIN", reason="fan is loud"), "10.0.0.1", FreshStart()),
        (node("IDLE+DRAIN", reason="minivm: gpu_count: 7 of 8"), "10.0.0.1", FreshStart()),  # only the broker lifts it
        (node("IDLE+DRAIN", reason=STOPPING), "10.0.0.1", FreshStart(updates=(RESUME,))),
        (node("DOWN", reason=STOPPING), "10.0.0.1", FreshStart(updates=(RESUME,))),
        (node("DOWN+DRAIN", reason=f"{STOPPING} : Not responding"), "10.0.0.1", FreshStart(updates=(RESUME,))),
    ],
)
def test_a_fresh_pod_tells_what_changed_and_lifts_only_its_own(found: Node, address: str, expected: FreshStart) -> None:
    assert plan_fresh_start(found, address) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (node(), FreshStart(delete_record=True)),
        (node("MIXED+DYNAMIC_NORM", busy=1), FreshStart(updates=(DOWN,), delete_record=True)),
        (node("DOWN+DRAIN+DYNAMIC_NORM", reason=STOPPING), FreshStart(delete_record=True)),
        (node("IDLE+DRAIN+DYNAMIC_NORM", reason="fan is loud"), FreshStart(delete_record=True, born=FAN)),
        (
            node("MIXED+DRAIN+DYNAMIC_NORM", reason="fan is loud", busy=1),
            FreshStart(updates=(("state=down", "reason=fan is loud"),), delete_record=True, born=FAN),
        ),
        (node("IDLE", reason=""), FreshStart()),  # slurm.conf defines what a static node offers
    ],
)
def test_a_pod_that_offers_something_else_registers_anew_and_is_born_drained(found: Node, expected: FreshStart) -> None:
    assert plan_fresh_start(found, "10.0.0.1", differs=True) == expected


def test_a_drain_that_is_carried_over_names_its_author_and_cannot_break_out_of_its_quotes() -> None:
    found = replace(node("DRAIN", reason='fan" CPUs=64 "\nloud'), author="ann@2026-11-20T10:32:18")
    assert born_held(found) == """State=DRAIN Reason="fan' CPUs=64 ''loud [ann@2026-11-20T10:32:18]\""""


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("IDLE", "", ""),
        ("IDLE", "fan is loud", ""),  # the reason outlived its drain
        ("MIXED+DRAIN", "fan is loud", "no jobs come: the node is drained in Slurm by ann since 2026: fan is loud"),
        ("DOWN", "power is off", "no jobs come: the node is down in Slurm by ann since 2026: power is off"),
        ("IDLE+DRAIN", STOPPING, f"no jobs come: the node is drained in Slurm by ann since 2026: {STOPPING}"),
        ("IDLE+NOT_RESPONDING", "", "the node does not answer slurmctld at 10.0.0.1, so no jobs come"),
    ],
)
def test_why_no_jobs_come_is_told_with_who_and_when(state: str, reason: str, said: str) -> None:
    assert words(replace(node(state, reason=reason), author="ann@2026")) == said


HARDWARE = "NodeName=w1 CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=24105"


@pytest.mark.parametrize(
    ("configuration", "hardware", "says"),
    [
        ("Feature=minivm", HARDWARE, ""),
        ("feature=minivm", f"{HARDWARE}\nUpTime=0-00:38:12", ""),
        ("Feature=minivm,blue", HARDWARE, "AvailableFeatures was minivm and is minivm,blue"),
        ("Feature=minivm Weight=7", HARDWARE, "Weight was 1 and is 7"),
        ("Feature=minivm Gres=gpu:8", HARDWARE, "Gres was nothing and is gpu:8"),
        ("Feature=minivm MemSpecLimit=100", HARDWARE, "MemSpecLimit was 0 and is 100"),
        ("Feature=minivm", HARDWARE.replace("24105", "16000"), "RealMemory was 24105 and is 16000"),
        ("Feature=minivm RealMemory=24105", HARDWARE.replace("24105", "30000"), ""),
        ("Feature=minivm CPUs=2", HARDWARE.replace("CPUs=2", "CPUs=8"), ""),
        ("Feature=minivm Parameters=x", HARDWARE, ""),  # not shown, so unknown
    ],
)
def test_what_a_pod_offers_is_compared_with_its_record(configuration: str, hardware: str, says: str) -> None:
    assert difference(dict(parse(LINE).shown), describe_registration(configuration, hardware)) == says


@pytest.mark.parametrize(
    ("shown", "offer", "same"),
    [
        ("gpu:h100:8(S:0-1)", "gpu:h100:8", True),
        ("gpu:h100:8(S:0-1)", "gpu:8", True),  # slurmd detected the type
        ("gpu:h100:8(S:0-1)", "gpu:h200:8", False),
        ("gpu:h100:8", "gpu:h100:7", False),
        ("gpu:8,nvme:2", "nvme:2,gpu:8", True),
        ("gpu:8", "", False),
        ("(null)", "", True),
    ],
)
def test_generic_resources_are_compared_by_what_they_count(shown: str, offer: str, same: bool) -> None:
    known = {"Gres": shown, "AvailableFeatures": "(null)", "Weight": "1"}
    assert (difference(known, {"gres": offer}) == "") is same


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "knows no node w1"),
        (Node("w1", "UNKNOWN", "10.0.0.1", "", "None", 0), "not registered"),
        (node("IDLE*"), "gets no answer from w1 at 10.0.0.1"),
        (node("IDLE+NOT_RESPONDING"), "gets no answer"),
        (node("IDLE*", address="10.0.0.9"), "gets no answer from w1 at 10.0.0.9, and the pod has 10.0.0.1"),
        (node(address="10.0.0.9"), "has the address 10.0.0.9 for w1, and the pod has 10.0.0.1"),
        (node("DOWN", reason="Not responding"), "down in Slurm: Not responding"),
        (node("IDLE+DRAIN", reason="fan"), ""),  # a known drain: the pod is ready without jobs
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
        ({}, 13.0),  # half of what a grace period of 30 s leaves
        ({"MINIVM_GRACE_SECONDS": "soon"}, 13.0),
        ({"MINIVM_GRACE_SECONDS": "300"}, 147.0),
        ({"MINIVM_GRACE_SECONDS": "300", "MINIVM_DRAIN_SECONDS": "120"}, 120.0 + REQUEUE),
        ({"MINIVM_GRACE_SECONDS": "300", "MINIVM_DRAIN_SECONDS": "0"}, REQUEUE),
        ({"MINIVM_GRACE_SECONDS": "300", "MINIVM_DRAIN_SECONDS": "long"}, 147.0),
        ({"MINIVM_DRAIN_SECONDS": "120"}, 13.0),
        ({"MINIVM_GRACE_SECONDS": "1"}, 0.0),
    ],
)
def test_a_drain_ends_before_pid_1_would_end_it(env: dict[str, str], seconds: float) -> None:
    assert budget(env, lambda total: total / 2) == pytest.approx(seconds)


@pytest.mark.parametrize(("grace", "drain"), [(45, 25), (120, 60), (600, 580), (120, 100), (20, 0), (35, 15)])
def test_jobs_get_the_seconds_that_the_operator_gives(
    grace: int, drain: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chart gives a pod at least 20 s more than its jobs; the services of a worker may take longer."""
    plan = plan_of("worker")
    assert plan.drain is not None
    env = {"MINIVM_GRACE_SECONDS": str(grace), "MINIVM_DRAIN_SECONDS": str(drain)}
    begun = Engine(plan, float(grace), lambda: 0.5, Trace(), read_wished_drain_time(env))
    begun.begin(0.0)
    begun.ending.begin(0.0)
    limit = begun.errands["drain"].timeout
    assert limit is not None

    def allowed(total: float) -> float:
        assert plan.drain is not None
        return drain_budget(plan.drain, plan.services, total, read_wished_drain_time(env))

    assert drain + REQUEUE <= budget(env, allowed) <= limit - ENDING
    assert not capsys.readouterr().out


def test_a_drain_tells_seconds_that_it_cannot_give(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"MINIVM_GRACE_SECONDS": "45", "MINIVM_DRAIN_SECONDS": "44"}
    assert budget(env, lambda total: total - 5) == pytest.approx(35)
    assert "44 s for jobs do not fit into MINIVM_GRACE_SECONDS=45: 30 s" in capsys.readouterr().out


def test_the_drain_of_a_worker_gets_what_a_long_grace_leaves() -> None:
    plan = plan_of("worker")
    assert plan.drain is not None
    most = drain_budget(plan.drain, plan.services, 3600 - kill_margin(3600))
    assert budget({"MINIVM_GRACE_SECONDS": "3600"}, lambda total: most) > 3500
