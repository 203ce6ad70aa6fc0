"""Watched directories, including those that are created during the call that starts the watch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from init.pod import dirwatch
from init.pod.dirwatch import Watcher


class Busy:
    """Fake libc in which a directory is created right after the kernel has reported it missing."""

    def __init__(self, libc: Any, makes: list[Path]) -> None:
        self.libc, self.makes, self.inotify_init1 = libc, makes, libc.inotify_init1

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


class Full:
    """Fake libc of a kernel that has no inotify instances or no watches left."""

    def __init__(self, libc: Any) -> None:
        self.libc, self.instances, self.watches = libc, 0, 0

    def inotify_init1(self, flags: int) -> int:
        return int(self.libc.inotify_init1(flags)) if self.instances else -1

    def inotify_add_watch(self, descriptor: int, path: bytes, mask: int) -> int:
        return int(self.libc.inotify_add_watch(descriptor, path, mask)) if self.watches else -1


@pytest.mark.parametrize("missing", ["instances", "watches"])
def test_where_the_kernel_gives_no_watch_it_is_looked_now_and_then_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    """Without a watch the caller polls until the kernel grants one.

    A container of another pod may have taken the last watch, and reports must not wait for ever.
    """
    watcher = Watcher()
    full = Full(watcher._libc)
    full.instances = full.watches = 1
    setattr(full, missing, 0)
    monkeypatch.setattr(watcher, "_libc", full)
    monkeypatch.setattr(dirwatch, "LOOK_AGAIN", 0.01)
    for _ in range(2):
        watcher.watch(tmp_path)
        assert not watcher.wait(None), "it comes back, and who asks looks"
    assert capsys.readouterr().err.count("is checked every") == 1
    setattr(full, missing, 1)
    watcher.watch(tmp_path)
    (tmp_path / "file").write_text("x")
    assert watcher.wait(60.0), "the kernel says so again"
