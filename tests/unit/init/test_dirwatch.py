"""Directories under watch, also those that somebody makes at that very moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from init.pod.dirwatch import Watcher


class Busy:
    """A kernel that is asked for a directory right before somebody makes it."""

    def __init__(self, libc: Any, makes: list[Path]) -> None:
        self.libc, self.makes = libc, makes

    def inotify_add_watch(self, descriptor: int, path: bytes, mask: int) -> int:
        answer: int = self.libc.inotify_add_watch(descriptor, path, mask)
        if answer < 0 and self.makes and os.fsdecode(path) == str(self.makes[0]):
            self.makes.pop(0).mkdir()
        return answer


def test_what_is_made_while_it_is_looked_for_is_watched_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = tmp_path / "a", tmp_path / "a" / "b"
    watcher = Watcher()
    monkeypatch.setattr(watcher, "_libc", Busy(watcher._libc, [outer, inner]))
    watcher.watch(inner)
    watcher.wait(0)
    (inner / "file").write_text("x")
    assert watcher.wait(0), "a change in it is seen"


def test_where_nothing_is_made_the_nearest_that_is_there_is_watched(tmp_path: Path) -> None:
    watcher = Watcher()
    (tmp_path / "file").write_text("no directory")
    for missing in (tmp_path / "a" / "b", tmp_path / "file"):
        watcher.watch(missing)
    (tmp_path / "a").mkdir()
    assert watcher.wait(0)
