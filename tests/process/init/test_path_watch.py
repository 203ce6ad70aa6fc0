"""Waiting for a path, while others make the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from init.pid1.probes import Inotify, PathWatch
from init.pid1.wait import Poller
from tests.waiting import until


class Late(Inotify):
    """Something happens after each look at the way, and before its watch."""

    def __init__(self, poller: Poller, happens: Iterator[Callable[[], object]]) -> None:
        super().__init__(poller)
        self._happens = happens

    def aim(self, watcher: PathWatch, directory: str) -> int:
        next(self._happens, lambda: None)()
        return super().aim(watcher, directory)


def found(path: Path, happens: list[Callable[[], object]]) -> bool:
    """Tell whether the watch reports the path when it appears after these events."""
    seen: list[bool] = []
    poller = Poller()
    watch = PathWatch(
        Late(poller, iter(happens)), str(path), lambda: seen.append(path.exists()), lambda attempt: attempt()
    )
    path.touch()

    def heard() -> bool:
        poller.wait(poller.now() + 0.05)
        return any(seen)

    try:
        until(heard, "it is heard of")
    except AssertionError:
        return False
    finally:
        watch.close()
    return True


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_directory_made_between_a_look_and_its_watch_is_not_missed(tmp_path: Path, steps: int) -> None:
    ways = [tmp_path.joinpath(*"abcde"[:count]) for count in range(1, 6)]
    happens: list[Callable[[], object]] = [way.mkdir for way in ways[:steps]]
    happens += [lambda: ways[-1].mkdir(parents=True, exist_ok=True)]
    assert found(ways[-1] / "flag", happens)


def test_who_makes_and_removes_a_directory_at_each_look_holds_nobody_up(tmp_path: Path) -> None:
    way = tmp_path / "way"

    def toggle() -> None:
        if way.exists():
            way.rmdir()
        else:
            way.mkdir()

    watch = PathWatch(Late(Poller(), iter([toggle] * 1000)), str(way / "flag"), lambda: None, lambda attempt: attempt())
    watch.close()
