"""What was read of small files, for as long as they are the same ones: the runner's forks find it read.

A file is known by its inode, size and times; who publishes writes a new one. What a run asks for is looked at once: a
fork believes what was looked at for it just before it was made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar, cast

T = TypeVar("T")
Stamp = tuple[int, int, int, int]
MOST = 2000


def stamp(path: Path | str) -> Stamp | None:
    """None where there is no such file, or nobody can tell."""
    try:
        found = os.stat(path)  # noqa: PTH116  # before each job, some dozen times
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns


class Kept:
    def __init__(self) -> None:
        self._found: dict[object, tuple[tuple[Stamp | None, ...], object]] = {}
        # What the look that is under way, or was the last, has asked for.
        self._seen: set[object] = set()

    def look(self) -> None:
        """Another run: what it asks for is looked at."""
        self._seen.clear()

    def get(self, name: object, files: Iterable[Path | str], read: Callable[[], T]) -> T:
        """What `read` gave when these files were as they are. Stamped first: what changes meanwhile is read again."""
        found = self._found.get(name)
        if found is not None and name in self._seen:
            return cast(T, found[1])
        now = tuple(map(stamp, files))
        self._seen.add(name)
        if found is None or found[0] != now:
            if len(self._found) >= MOST:
                # Commits come and go; what is needed is back after one look.
                self._found.clear()
            found = self._found[name] = now, read()
        return cast(T, found[1])
