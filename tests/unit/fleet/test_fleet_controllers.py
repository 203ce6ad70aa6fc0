"""Two controllers in `fleet status`, `fleet why`, the page and the metrics: which acts, and how it took over."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from fleet.cli import explain
from fleet.report.status import lines, picture, report
from fleet.report.web import LoopStats
from fleet.world.kubernetes import KubeCondition, KubePod, KubernetesView
from fleet.world.pod_page import READY
from fleet.world.snapshot import FleetSnapshot
from init.helpers.lease import Takeover
from init.view.conditions import ready_condition
from init.view.metrics import parse_turn
from tests.fleet_world import Worlds

HOW = Takeover(4, "slurm-controller-0", planned=False, since=0.0).describe(6.14)
TOOK_OVER = f"active, term 4: {HOW}"
STANDS_BY = "standby: slurm-controller-1 has term 4"


def pod(number: int, turn: str, *, ready: bool = True, degraded: tuple[str, ...] = ()) -> KubePod:
    """A controller's pod with the condition that its own PID 1 makes."""
    reply = {"ready": ready, "phase": "running", "reasons": () if ready else ("x",), "degraded": degraded, "turn": turn}
    made = ready_condition(reply)
    condition = KubeCondition(made["type"], made["status"], made["reason"], made["message"])
    return KubePod(f"slurm-controller-{number}", f"u{number}", node=f"m{number}", component="controller", ready=ready,
                   conditions={READY: condition})  # fmt: skip


def world(*pods: KubePod) -> tuple[Worlds, FleetSnapshot]:
    worlds = Worlds(2)
    worlds.machines = {}
    worlds.settle_in()
    snapshot = worlds.world()
    assert isinstance(snapshot.kubernetes, KubernetesView)
    others = {**snapshot.kubernetes.others, **{item.name: item for item in pods}}
    return worlds, replace(snapshot, kubernetes=replace(snapshot.kubernetes, others=others))


def test_the_acting_controller_and_the_standby_are_named_with_term_and_last_take_over() -> None:
    worlds, snapshot = world(pod(0, STANDS_BY), pod(1, TOOK_OVER, degraded=("slurmdbd: slow", "active, term 9")))
    decision = worlds.decide(snapshot)
    found = report(snapshot, decision, worlds.policy, worlds.now)
    standby, active = found["controllers"]
    assert (standby["role"], active["role"], active["term"]) == ("standby", "active", 4)
    assert active["takeover"] == {
        "how": "took over from", "former": "slurm-controller-0", "seconds": 6.1, "at": HOW.rpartition(" s, ")[2],
    }  # fmt: skip
    first, second, *_ = lines(found)
    assert first.split(maxsplit=2) == ["slurm-controller-0", "m0", STANDS_BY]
    assert second.split(maxsplit=2) == ["slurm-controller-1", "m1", TOOK_OVER]
    assert picture(snapshot, decision, worlds.policy, worlds.now)["controllers"] == found["controllers"]
    assert f"slurm-controller-1 on m1: ready; {TOOK_OVER}" in list(explain("slurm-controller-1", snapshot, decision))
    stats = LoopStats(time.monotonic(), leader=True)
    stats.update(snapshot, ())
    text = stats.metrics()
    assert 'minivm_fleet_controller_active{pod="slurm-controller-0"} 0' in text
    assert 'minivm_fleet_controller_active{pod="slurm-controller-1"} 1' in text
    assert 'minivm_fleet_controller_term{pod="slurm-controller-1"} 4' in text
    assert 'minivm_fleet_controller_takeover_seconds{pod="slurm-controller-1"} 6.1' in text


def test_of_two_that_act_only_the_one_of_the_higher_term_does() -> None:
    """The condition of a pod on a dead machine is from before the take-over."""
    worlds, snapshot = world(pod(0, "active, term 3"), pod(1, TOOK_OVER))
    found = report(snapshot, worlds.decide(snapshot), worlds.policy, worlds.now)
    assert [each["role"] for each in found["controllers"]] == ["", "active"]
    assert "whether it acts is not known" in next(lines(found))


@pytest.mark.parametrize(
    "turn", ["", "active, term x", "active, term 99999999999", "active, term 4: evil", "term 4", "standby: "]
)
def test_words_of_another_form_are_not_believed(turn: str) -> None:
    worlds, snapshot = world(pod(0, turn), pod(1, TOOK_OVER, ready=False))
    found = report(snapshot, worlds.decide(snapshot), worlds.policy, worlds.now)
    assert [each["role"] for each in found["controllers"]] == ["", ""]


def test_a_single_controller_is_named_only_where_it_is_not_ready() -> None:
    worlds, snapshot = world(pod(0, ""))
    assert "slurm-controller-0" not in " ".join(
        lines(report(snapshot, worlds.decide(snapshot), worlds.policy, worlds.now))
    )
    worlds, snapshot = world(pod(0, "", ready=False))
    first = next(lines(report(snapshot, worlds.decide(snapshot), worlds.policy, worlds.now)))
    assert first.startswith("slurm-controller-0") and "not ready" in first


def test_the_controllers_own_metrics_read_the_same_words() -> None:
    assert parse_turn(TOOK_OVER) == (True, 4, 6.1)
