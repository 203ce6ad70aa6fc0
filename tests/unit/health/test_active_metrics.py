"""Metrics of the planner of active checks: which waiting jobs idle nodes fit, and which parts are to blame."""

from __future__ import annotations

from datetime import datetime

import pytest

from health.active import __main__ as service
from health.active import metrics
from health.active.culprit import Culprit, Part
from health.active.turn import CheckState, MachineResult, PlanMemory
from init.slurm.node import parse
from init.view.metrics import open_metrics

NOW = datetime.fromisoformat("2026-11-26T20:00:00").timestamp()
NODE = (
    "NodeName={} CPUAlloc=0 State={} ActiveFeatures=minivm,h100 Partitions={},minivm-active "
    "CfgTRES=cpu=8,mem=1.50T,billing=8,gres/gpu=8,gres/gpu:h100=8"
)
NODES = [
    parse(NODE.format("g-0", "IDLE", "gpu")),
    parse(NODE.format("g-1", "IDLE", "gpu,all")),
    parse(NODE.format("g-2", "IDLE+PLANNED", "gpu,all")),
    parse(NODE.format("g-3", "IDLE+DRAIN", "gpu,all")),
    parse(NODE.format("g-4", "MIXED", "gpu,all")),
]
# Partition, reason, eligible, nodes, TRES, required, excluded nodes, reservation, features.
LINE = "{}|{}|N/A|{}|{}|{}|{}|{}|{}|{}|"
LONG, SHORT = "2026-11-26T19:00:00", "2026-11-26T19:50:00"
SMALL = "cpu=1,mem=100M,node=1,billing=1"
PAIR = "cpu=16,mem=2T,node=2,billing=16,gres/gpu=16"


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        (("gpu", "Resources", LONG, 1, SMALL, "", "", "(null)", "(null)"), (1, 0)),
        (("gpu,all", "Priority", LONG, 1, SMALL, "", "", "", ""), (1, 1)),
        (("gpu", "None", LONG, 2, PAIR, "", "", "(null)", "h100&minivm"), (1, 0)),
        (("all", "Resources", LONG, 2, PAIR, "", "", "(null)", "(null)"), (0, 0)),  # one idle node
        (("gpu", "Resources", LONG, 3, SMALL, "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 1, PAIR, "", "", "(null)", "(null)"), (0, 0)),  # 16 GPUs on one node
        (("gpu", "Resources", LONG, 1, "cpu=1,gres/gpu:a100=1", "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 1, "cpu=1,license/matlab=1", "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 2, SMALL, "", "g-[0-9]", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 1, SMALL, "", "g-0", "(null)", "(null)"), (1, 0)),
        (("gpu", "Resources", LONG, 1, SMALL, "g-0", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 1, SMALL, "", "", "maintenance", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, 1, SMALL, "", "", "(null)", "a100"), (0, 0)),
        (("gpu", "Resources", LONG, 1, SMALL, "", "", "(null)", "h100|a100"), (0, 0)),  # not judged
        (("gpu", "Resources", SHORT, 1, SMALL, "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", "N/A", 1, SMALL, "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", "2027-01-01T00:00:00", 1, SMALL, "", "", "(null)", "(null)"), (0, 0)),
        *(
            (("gpu", reason, LONG, 1, SMALL, "", "", "(null)", "(null)"), (0, 0))
            for reason in (
                "Dependency",
                "JobHeldUser",
                "BeginTime",
                "QOSMaxJobsPerUserLimit",
                "Licenses",
                "Reservation",
            )
        ),
        (("minivm-active", "Resources", LONG, 1, SMALL, "", "", "(null)", "(null)"), (0, 0)),
        (("gpu", "Resources", LONG, "many", SMALL, "", "", "(null)", "(null)"), (0, 0)),
    ],
)
def test_only_a_job_that_idle_nodes_fit_is_counted(fields: tuple[object, ...], counts: tuple[int, int]) -> None:
    line = LINE.format(*fields)
    found = service.find_startable([line, "nonsense", ""], NODES, NOW)
    assert found == dict(zip(("gpu", "all"), counts, strict=True))
    assert list(found) == sorted(found)


def test_without_idle_nodes_nothing_is_told() -> None:
    line = LINE.format("gpu", "Resources", LONG, 1, SMALL, "", "", "", "")
    assert service.find_startable([line], NODES[2:], NOW) == {}


def test_equal_requests_are_judged_once_and_all_counted() -> None:
    lines = [LINE.format("gpu", "Resources", LONG, 1, SMALL, "", "", "", "")] * 50_000
    assert service.find_startable(lines, NODES, NOW)["gpu"] == 50_000


def test_blamed_parts_are_told_by_name_and_bounded() -> None:
    switch = CheckState(culprits=(Culprit(Part.LEAF, "row/r1", 4),))
    machines = {
        f"w-{number}": MachineResult(1.0, passed=number > 40, failures=2 * (number < 40)) for number in range(99)
    }
    text = metrics.render(PlanMemory({"tcp": switch, "cpu": CheckState(machines)}), {"gpu": 3})
    lines = open_metrics(text, "minivm_active_")
    assert 'minivm_active_startable_jobs{partition="gpu"} 3' in lines
    assert 'minivm_active_blamed{check="tcp",part="leaf",name="row/r1"} 4' in lines
    assert 'minivm_active_blamed{check="cpu",part="machine",name="w-0"} 2' in lines
    many = {f"c{number}": switch for number in range(99)}
    assert metrics.render(PlanMemory(many), {}).count("minivm_active_blamed{") == metrics.MOST_BLAMED
