"""inotify: waiting for a path without asking again and again. The one place that needs it loads ctypes, late."""

from __future__ import annotations

import ctypes
import os
import struct

from init.poller import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.poller import Poller

CREATED, MOVED_IN, ATTRIBUTES, DELETED_SELF, MOVED_SELF = 0x100, 0x80, 0x4, 0x400, 0x800
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name


class Inotify:
    """One instance for PID 1's whole life: to close one costs 15 ms, in which the kernel waits for its readers."""

    def __init__(self, poller: Poller) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watchers: dict[int, list[PathWatch]] = {}
        poller.add(self._fd, IN, self._readable)

    def aim(self, watcher: PathWatch, directory: str) -> int:
        mask = CREATED | MOVED_IN | ATTRIBUTES | DELETED_SELF | MOVED_SELF
        watch: int = self._libc.inotify_add_watch(self._fd, directory.encode(), mask)
        if watch >= 0:
            self._watchers.setdefault(watch, []).append(watcher)
        return watch

    def drop(self, watcher: PathWatch, watch: int) -> None:
        left = self._watchers.get(watch, [])
        if watcher in left:
            left.remove(watcher)
        if not left and self._watchers.pop(watch, None) is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    def _readable(self, _: int) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        seen: dict[int, None] = {}
        at = 0
        while at < len(data):
            watch, _mask, _cookie, length = _EVENT.unpack_from(data, at)
            seen[watch] = None
            at += _EVENT.size + length
        for watch in seen:
            for watcher in list(self._watchers.get(watch, ())):
                watcher.moved()


class PathWatch:
    """Calls back whenever something appears in the nearest directory that exists on the way to a path."""

    def __init__(self, inotify: Inotify, path: str, appeared: Callable[[], None]) -> None:
        self._inotify, self._path, self._appeared = inotify, path, appeared
        self._watch = -1
        self._aim()

    def _aim(self) -> None:
        """Watch the deepest existing directory above the path; the way to it may have grown."""
        directory = os.path.dirname(self._path)  # noqa: PTH120 - no pathlib on PID 1's path
        while directory not in ("", "/") and not os.path.isdir(directory):  # noqa: PTH112 - no pathlib on PID 1's path
            directory = os.path.dirname(directory)  # noqa: PTH120 - as above
        before, self._watch = self._watch, self._inotify.aim(self, directory or "/")
        if before >= 0:  # only after the new one: the same directory has the same watch, and keeps it
            self._inotify.drop(self, before)

    def moved(self) -> None:
        """Look before the watch is aimed anew: what is there ends the probe, and with it the watch."""
        self._appeared()
        if self._watch >= 0:
            self._aim()
            self._appeared()  # it may have come before the new watch

    def close(self) -> None:
        if self._watch >= 0:
            self._inotify.drop(self, self._watch)
            self._watch = -1
