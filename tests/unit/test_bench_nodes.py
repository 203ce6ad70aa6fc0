"""Number of real slurmd that `bench fleet` starts: no more than fit the machine, whatever the user requests."""

from __future__ import annotations

import pytest

from bench import fleet

NAME = "MINIVM_BENCH_SLURMD"


@pytest.mark.parametrize(
    ("size", "memory_mb", "threads", "many"),
    [
        (5000, 23000, 32768, 2111),
        (5000, 8000, 32768, 444),  # a machine with 8 GB
        (200, 8000, 32768, 200),  # never more than the number of nodes
        (5000, 64000, 32768, 2212),  # limited by a small machine's pid_max
        (5000, 3000, 32768, 0),
        (5000, 23000, 1000, 0),
    ],
)
def test_so_many_fit_by_memory_and_by_threads(size: int, memory_mb: float, threads: int, many: int) -> None:
    assert fleet.count_fitting(size, memory_mb, threads) == many


def test_the_usual_number_is_cut_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(fleet, "count_fitting_here", lambda size: 300)
    assert (fleet.choose_slurmd(5000, 2000), fleet.choose_slurmd(5000, 200)) == (300, 200)


@pytest.mark.parametrize("asked", ["301", "-1", "many", "1e3", "9" * 5000])
def test_a_number_that_does_not_fit_or_is_none_is_refused_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(fleet, "count_fitting_here", lambda size: 300)
    monkeypatch.setenv(NAME, asked)
    with pytest.raises(SystemExit, match=f"{NAME}: found '{asked}', expected a number up to 300"):
        fleet.choose_slurmd(5000, 2000)


def test_it_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "count_fitting_here", lambda size: 300)
    monkeypatch.setenv(NAME, "0")
    assert fleet.choose_slurmd(5000, 2000) == 0
