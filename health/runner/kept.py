"""Cache of values parsed from small files, valid while the files are unchanged; forks of the runner inherit it.

A file is identified by its inode, size and times; publishing writes a new file. Each run looks at a file once: a fork
believes what the runner looked at just before forking.
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
    """Return a file's identity; None if it is missing or unreadable."""
    try:
        status = os.stat(path)  # noqa: PTH116  # before each job, some dozen times
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns


class FileCache:
    def __init__(self) -> None:
        self._found: dict[object, tuple[tuple[Stamp | None, ...], object]] = {}
        # Names requested since the last `look`.
        self._seen: set[object] = set()

    def look(self) -> None:
        """Begin another run: files are looked at again."""
        self._seen.clear()

    def get(self, name: object, files: Iterable[Path | str], read: Callable[[], T]) -> T:
        """Return what `read` gave for these files.

        The stamp precedes the read: a file that changes meanwhile is read again.
        """
        entry = self._found.get(name)
        if entry is not None and name in self._seen:
            return cast(T, entry[1])
        now = tuple(map(stamp, files))
        self._seen.add(name)
        if entry is None or entry[0] != now:
            if len(self._found) >= MOST:
                # Commits come and go; entries in use return with the next look.
                self._found.clear()
            entry = self._found[name] = now, read()
        return cast(T, entry[1])
