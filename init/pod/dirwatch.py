"""The kernel's word that one of several directories has changed, for helpers that may block. Nothing polls."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

# linux/inotify.h. Kubernetes swaps a ConfigMap by renaming `..data`; people copy, write and move.
CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF = 0x8, 0x40, 0x80, 0x100, 0x200, 0x400
CHANGES = CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF
ONLY_DIRECTORIES = 0x01000000
AGAIN = 8  # directories that somebody makes just now


class Watcher:
    """Directories under watch. A missing one is not an error: its nearest parent is watched, to see it appear."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify_init1: {os.strerror(number)}")

    def watch(self, directory: Path) -> None:
        """Watches the directory, or the nearest parent that exists; a second watch of the same is the same."""
        mask = CHANGES | ONLY_DIRECTORIES
        for _ in range(AGAIN):
            below = None
            for each in (directory, *directory.parents):
                if self._libc.inotify_add_watch(self.descriptor, os.fsencode(each), mask) >= 0:
                    break
                below = each
            # Made between the two looks, it would be nobody's change.
            if below is None or not below.is_dir():
                return

    def wait(self, timeout: float | None) -> bool:
        """True once something has changed (the events themselves are dropped: who asks looks at everything)."""
        ready, _, _ = select.select([self.descriptor], [], [], timeout)
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
