"""The kernel's word that one of several directories has changed, for helpers that may block. Nothing polls.

But where the kernel has no watch to give: root's are counted for all pods of a machine together, and others may have
taken them.
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
AGAIN = 8  # directories that somebody makes just now
LOOK_AGAIN = 60.0  # seconds, where a directory is not watched that should be


class Watcher:
    """Directories under watch. A missing one is not an error: its nearest parent is watched, to see it appear."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = -1
        self._unwatched: set[Path] = set()
        self._said = False

    def watch(self, directory: Path) -> None:
        """Watches the directory, or the nearest parent that exists; a second watch of the same is the same."""
        why = self._watch(directory)
        (self._unwatched.add if why else self._unwatched.discard)(directory)
        if why and not self._said:
            print(f"inotify: {why}: {directory} is looked at every {LOOK_AGAIN:g} s", file=sys.stderr, flush=True)
        self._said = self._said or bool(why)

    def _watch(self, directory: Path) -> str:
        """Why the kernel does not watch it, or ""."""
        mask = CHANGES | ONLY_DIRECTORIES
        if self.descriptor < 0:
            self.descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            return os.strerror(ctypes.get_errno())
        for _ in range(AGAIN):
            below = None
            for each in (directory, *directory.parents):
                if self._libc.inotify_add_watch(self.descriptor, os.fsencode(each), mask) >= 0:
                    break
                below = each
            # Made between the two looks, it would be nobody's change.
            if below is None or not below.is_dir():
                return ""
        return os.strerror(ctypes.get_errno())

    def wait(self, timeout: float | None) -> bool:
        """True once something has changed (the events themselves are dropped: who asks looks at everything)."""
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
        """Returns when nothing has changed for a while: a copy of several files is one change."""
        while self.wait(quiet):
            pass
