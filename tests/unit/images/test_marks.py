"""Marks of running builds: which process may treat one as abandoned, and when unclear marks expire."""

from __future__ import annotations

import os
import time
from pathlib import Path

from images.engine.docker import KEPT_S, Marks


def aged(path: Path) -> Path:
    os.utime(path, (then := time.time() - KEPT_S - 60, then))
    return path


def test_a_mark_that_nobody_will_judge_goes_after_a_while(tmp_path: Path) -> None:
    """A mark that no build can judge expires after a while.

    Every build that finds a mark queries the engine, so marks that stay would slow down each build.
    """
    living = Marks(tmp_path, "here")
    mine = aged(tmp_path / living.own())
    kept = {mine.name}
    for name, text in (("dead", "here"), ("elsewhere", "there"), ("unsaid", "")):
        for age in (str, aged):
            path = tmp_path / f"{name}-{age.__name__}"
            path.write_text(text)
            age(path)
            if name == "dead" or age is str:
                kept.add(path.name)
    found = [path.name for path in Marks(tmp_path, "here").lock_dead()]
    assert found == ["dead-aged", "dead-str"]
    assert {path.name for path in tmp_path.iterdir()} == kept
    living.release()
