"""Which tasks of a running job the page names: those that the numbers show to be different, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from health.jobs import ask, ranks
from health.jobs.boxes import Box
from health.jobs.model import Answer, Job, JobCause, World
from health.jobs.ranks import Task

MIB = 1 << 20
JOB = Job(id=12, shown="12", states=frozenset({"RUNNING"}), nodes="w0,w1")
NOW: dict[str, object] = {"kind": "now", "at": 1e9}


def task(rank: int, percent: float, seconds: float = 1000, state: str = "", written: int = 0, node: str = "") -> Task:
    return Task(node or f"w{rank // 4}", 0, rank, seconds, percent, state, written)


def sentence(tasks: Sequence[Task]) -> str:
    lag = ranks.judge(tasks)
    return lag.sentence if lag else ""


def others(number: int, percent: float = 98, seconds: float = 1000) -> list[Task]:
    return [task(rank, percent, seconds) for rank in range(number)]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([*others(7), task(7, 3, 900)],
         "Task 7 on w1 uses 3 % of a processor while the other 7 use 98 %: it may be stuck or wait."),
        ([*others(4), task(4, 3, 900), task(5, 0, 900)],
         "Tasks 4, 5 on w1 use 0 to 3 % of a processor while the other 4 use 98 %: they may be stuck or wait."),
        ([*others(3), task(3, 0, 9), task(4, 0, 9)],
         "Task 3 on w0, task 4 on w1 use 0 % of a processor while the other 3 use 98 %: they may be stuck or wait."),
        ([task(0, 97), task(4, 1, 900)],
         "Task 4 on w1 uses 1 % of a processor while task 0 on w0 uses 97 %: it may be stuck or wait."),
        ([*others(7), task(7, 0, 900, "D")],
         "Task 7 on w1 uses 0 % of a processor while the other 7 use 98 %: it waits for a device or a file system."),
        ([*others(7, 0, 10), task(7, 800, 5000)],
         "Task 7 on w1 uses 800 % of a processor while the other 7 use 0 %: the others may wait for it."),
        ([*others(3), task(3, 98, state="T")],
         "Task 3 on w0 is stopped: a signal such as SIGSTOP, or a debugger, did that; SIGCONT ends it."),
    ],
)  # fmt: skip
def test_a_task_that_differs_is_named(tasks: list[Task], expected: str) -> None:
    assert sentence(tasks) == expected
    assert sentence(list(reversed(tasks))).partition(" ")[2], "in any order"


@pytest.mark.parametrize(
    "tasks",
    [
        [],
        [task(0, 0)],
        others(8),
        others(8, 0, 0),
        [*others(7), task(7, 60, 900)],  # slower, but it works
        [*others(7), task(7, 3, 995)],  # it has done as much: a pause
        [*others(7), task(7, 3, 5000)],  # it has done more than the others
        [*others(7, 40), task(7, 15, 900)],  # slower, on a full machine
        [*others(6), task(6, 30, 900), task(7, 3, 900)],  # no two groups
        [*others(7), task(7, -1, 900)],  # one is not known
        [*others(7, 4), task(7, 0, 900)],  # none computes: on GPUs, perhaps
        [task(rank, 0, 900, "T") for rank in range(4)],  # all are stopped
    ],
)
def test_tasks_that_look_alike_or_are_not_known_are_not_named(tasks: list[Task]) -> None:
    assert not sentence(tasks)


def test_a_task_that_writes_nothing_is_evidence_only_where_the_others_write() -> None:
    wrote = [task(rank, 0, written=300 * MIB + rank) for rank in range(3)]
    assert ranks.find_silent([*wrote, task(4, 0)]) == (
        "task 4 on w1 has written nothing to files, the other 3 at least 300 MiB"
    )
    assert ranks.find_silent([wrote[0], task(4, 0, written=4096)]) == (
        "task 4 on w1 has written less than 1 MiB to files, task 0 on w0 300 MiB"
    )
    for usual in (
        [],
        wrote,
        [wrote[0], task(1, 0), task(2, 0)],  # rank 0 alone writes a checkpoint
        [*wrote, task(4, 0, written=-1)],
        [*wrote, task(4, 0, written=30 * MIB)],
        [task(0, 0, written=MIB), task(1, 0), task(2, 0, written=MIB)],
    ):
        assert ranks.find_silent(usual) == ""


def page(*boxes: Box, cause: JobCause = JobCause.NONE) -> Answer:
    return ask.add_node_reports(Answer("It runs.", cause), boxes, JOB, World(), 1e9)


def box(node: str, *rows: list[object], **more: object) -> Box:
    return Box(node, ({**NOW, "processes": 9, "tasks": list(rows), **more},))


def test_the_page_compares_the_tasks_of_all_nodes() -> None:
    answer = page(
        box(
            "w0", [0, 0, 900.5, 99.1, "", 0], [0, 1, 900, 98, "", 0], bytes=[5 * MIB, 2 << 40], bytes_a_second=[0, MIB]
        ),
        box("w1", [0, 2, 100, 0.2, "", 0], bytes=[0, 9], bytes_a_second=[0, 0]),
    )
    assert answer.headline == (
        "It runs. Task 2 on w1 uses 0 % of a processor while the other 2 use 98 to 99 %: it may be stuck or wait."
    )
    assert answer.cause is JobCause.UNKNOWN and "-w w1 --pty top" in answer.advice[0]
    assert [fact.text for fact in answer.evidence] == [
        "on w0 2 tasks use 98 to 99 % of a processor each now; its processes have read 5 MiB from files and written"
        " 2 TiB (now nothing and 1 MiB a second)",
        "on w1 task 2 uses 0 % of a processor now; its processes have read nothing from files and written"
        " less than 1 MiB (nothing now)",
    ]
    blamed = page(box("w0", [0, 0, 900, 99, "", 0]), box("w1", [0, 1, 1, 0, "", 0]), cause=JobCause.MACHINE)
    assert blamed.cause is JobCause.MACHINE, "a machine's fault stays the cause"
    steps = page(box("w0", [0, 0, 900, 99, "", 0]), box("w1", [1, 0, 1, 0, "", 0]))
    assert steps.headline == "It runs.", "tasks of two steps are not compared"


def test_what_a_node_cannot_see_is_named() -> None:
    many = Box("w0", ({**NOW, "processes": 10_000},))
    hidden = box("w1", [0, 0, 1, 0, "", -1])
    assert page(many, hidden).unknown == (
        "what its tasks on w0 do: it has more than 4096 processes there",
        "what it reads and writes on w1: the pod may not see all of its processes (SYS_PTRACE)",
    )
    assert page(Box("w0", (NOW,)), Box("w1", obstacle="timed out")) == Answer("It runs.", JobCause.NONE)


@pytest.mark.parametrize(
    "entry",
    [
        {"tasks": 1}, {"tasks": [1, [], [0, 0, 0], None, [0, 0, "x", 0, "", 0]]}, {"tasks": {"0": 1}},
        {"tasks": [[0, 0, True, 0, "", 0]]}, {"tasks": [[0, 0, 1, 1, "\x1b[31m", 0]]},
        {"tasks": [[0, 0, 1, 1, [], 0]]}, {"tasks": [[-1, 0, 1, 1, "", 0]]}, {"tasks": [[0, 0, 1 << 70, 1, "", 0]]},
        {"bytes": [1]}, {"bytes": ["a", 1]}, {"bytes": [-1, 1]}, {"bytes": {}}, {"processes": "many"},
        {"processes": [], "tasks": None},
    ],
)  # fmt: skip
def test_odd_lines_say_nothing(entry: dict[str, object]) -> None:
    assert page(Box("w0", ({**NOW, **entry},))) == Answer("It runs.", JobCause.NONE)
