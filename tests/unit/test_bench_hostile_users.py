"""Report and exit code of `bench hostile-users`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from bench import __main__ as bench
from bench.hostile_users import CONTROLLER, LOGIN, CommandSample, figures, report

JOBS = {"1": "COMPLETED", "2": "COMPLETED"}
FINE = [CommandSample(False, "squeue", 0.1), CommandSample(True, "squeue", 0.3), CommandSample(True, "squeue", 1.9)]


def test_honest_users_who_lose_nothing_are_reported_with_their_medians() -> None:
    assert not any(figures(FINE, JOBS).values())
    assert "squeue: quiet 0.10 s, flooded 1.10 s, longest 1.90 s; 0 failed, 0 over 2 s of 2" in report(FINE, JOBS)


@pytest.mark.parametrize(
    ("sample", "state", "counts"),
    [
        (CommandSample(True, "squeue", 2.1), "COMPLETED", [0, 0, 1, 0]),
        (CommandSample(False, "squeue", 2.1), "COMPLETED", [0, 0, 0, 0]),  # slow without an attack: the machine's load
        (CommandSample(True, "squeue", 1, failed=True, ready=(CONTROLLER, LOGIN)), "COMPLETED", [0, 1, 0, 1]),
        (CommandSample(True, "squeue", 1, failed=True, ready=(CONTROLLER,)), "COMPLETED", [0, 1, 0, 0]),
        (CommandSample(True, "squeue", 1), "NODE_FAIL", [1, 0, 0, 0]),
        (CommandSample(True, "squeue", 1), "unknown", [1, 0, 0, 0]),
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
