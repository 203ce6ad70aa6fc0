"""Watch of several directories by inotify, for helpers that may block.

It polls only when the kernel refuses a watch: all pods of a machine share root's limit, and others may have used it up.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from pathlib import Path

# linux/inotify.h. Kubernetes swaps a ConfigMap by renaming `..data`; people copy, write and move.
CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF = 0x8, 0x40, 0x80, 0x100, 0x200, 0x400
CHANGES = CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF
ONLY_DIRECTORIES = 0x01000000
AGAIN = 8  # tries while a process creates directories on the path
LOOK_AGAIN = 60.0  # seconds between looks at a directory that cannot be watched


class Watcher:
    """Watched directories. For a missing one, its nearest parent is watched, to see it appear."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = -1
        self._unwatched: set[Path] = set()
        self._said = False

    def watch(self, directory: Path) -> None:
        """Watch the directory, or its nearest existing parent; watching it twice is harmless."""
        refusal = self._watch(directory)
        (self._unwatched.add if refusal else self._unwatched.discard)(directory)
        if refusal and not self._said:
            print(f"inotify: {refusal}: {directory} is checked every {LOOK_AGAIN:g} s", file=sys.stderr, flush=True)
        self._said = self._said or bool(refusal)

    def _watch(self, directory: Path) -> str:
        """Watch a directory; return the error if the kernel refuses, else ""."""
        mask = CHANGES | ONLY_DIRECTORIES
        if self.descriptor < 0:
            self.descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            return os.strerror(ctypes.get_errno())
        for _ in range(AGAIN):
            below = None
            for candidate in (directory, *directory.parents):
                if self._libc.inotify_add_watch(self.descriptor, os.fsencode(candidate), mask) >= 0:
                    break
                below = candidate
            # A directory created between the two looks would cause no event.
            if below is None or not below.is_dir():
                return ""
        return os.strerror(ctypes.get_errno())

    def wait(self, timeout: float | None) -> bool:
        """Wait; True once something changed. The events are dropped: the caller looks at everything."""
        if self._unwatched:
            timeout = LOOK_AGAIN if timeout is None else min(timeout, LOOK_AGAIN)
        ready, _, _ = select.select([self.descriptor] if self.descriptor >= 0 else [], [], [], timeout)
        if ready:
            try:
                while os.read(self.descriptor, 1 << 16):
                    pass
            except BlockingIOError:
                pass
        return bool(ready)

    def wait_until_quiet(self, quiet: float) -> None:
        """Wait until nothing has changed for a while: a copy of several files is one change."""
        while self.wait(quiet):
            pass
