"""Report and exit code of `bench hostile-users`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from bench import __main__ as bench
from bench.hostile_users import ATTACKED, CONTROLLER, LOGIN, QUIET, CommandSample, figures, report

JOBS = {"1": "COMPLETED", "2": "COMPLETED"}
FINE = [CommandSample(phase, "squeue", seconds) for phase, seconds in ((QUIET, 0.1), (ATTACKED, 0.3), (ATTACKED, 1.9))]


def test_honest_users_who_lose_nothing_are_reported_with_their_medians() -> None:
    assert not any(figures(FINE, JOBS).values())
    lines = report(FINE, JOBS)
    assert "squeue, quiet: median 0.10 s, longest 0.10 s; 0 failed, 0 over 2 s of 1" in lines
    assert "squeue, under attack: median 1.10 s, longest 1.90 s; 0 failed, 0 over 2 s of 2" in lines


def test_a_failed_command_is_reported_with_its_message() -> None:
    sample = CommandSample(ATTACKED, "sinfo", 1, failure="Unable to contact slurm controller")
    assert "failed under attack: sinfo: Unable to contact slurm controller" in report([*FINE, sample], JOBS)


@pytest.mark.parametrize(
    ("sample", "state", "counts"),
    [
        (CommandSample(ATTACKED, "squeue", 2.1), "COMPLETED", [0, 0, 1, 0]),
        (CommandSample(QUIET, "squeue", 2.1), "COMPLETED", [0, 0, 0, 0]),  # slow without an attack: the machine's load
        (
            CommandSample(ATTACKED, "squeue", 1, failure="timed out", ready=(CONTROLLER, LOGIN)),
            "COMPLETED",
            [0, 1, 0, 1],
        ),
        (CommandSample(ATTACKED, "squeue", 1, failure="timed out", ready=(CONTROLLER,)), "COMPLETED", [0, 1, 0, 0]),
        (CommandSample(ATTACKED, "squeue", 1), "NODE_FAIL", [1, 0, 0, 0]),
        (CommandSample(ATTACKED, "squeue", 1), "unknown", [1, 0, 0, 0]),
    ],
)
def test_each_loss_is_counted_once(sample: CommandSample, state: str, counts: list[int]) -> None:
    assert list(figures([*FINE, sample], JOBS | {"3": state}).values()) == counts


def test_the_minutes_reach_the_area_and_its_verdict_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    area, seen = ModuleType("bench.hostile_users"), []

    def main() -> int:
        seen.append(os.environ["MINIVM_BENCH_MINUTES"])
        return 1

    monkeypatch.setattr(area, "main", main, raising=False)
    monkeypatch.setitem(sys.modules, "bench.hostile_users", area)
    monkeypatch.setattr(bench, "end_well", lambda: None)
    monkeypatch.setenv("MINIVM_BENCH_MINUTES", "")
    assert bench.main(["hostile-users", "--minutes", "0.5"]) == 1
    assert seen == ["0.5"]
