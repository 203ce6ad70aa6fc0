"""inotify: wait for a path without polling. Loaded late, because it needs ctypes."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from init.pid1.wait import IN, shut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.wait import Poller

CREATED, MOVED_IN, ATTRIBUTES, DELETED_SELF, MOVED_SELF = 0x100, 0x80, 0x4, 0x400, 0x800
OVERFLOW = -1  # the watch in an event that reports dropped events
MOST_LOOKS = 16
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name


class Inotify:
    """One instance for PID 1's whole life: closing one costs 15 ms, in which the kernel waits for its readers."""

    def __init__(self, poller: Poller) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error()
        self._watchers: dict[int, list[PathWatch]] = {}
        try:
            poller.add(self._fd, IN, self._readable)
        except OSError:
            shut(self._fd)
            raise

    def aim(self, watcher: PathWatch, directory: str) -> int:
        mask = CREATED | MOVED_IN | ATTRIBUTES | DELETED_SELF | MOVED_SELF
        watch: int = self._libc.inotify_add_watch(self._fd, directory.encode(), mask)
        if watch < 0:
            raise _error()
        self._watchers.setdefault(watch, []).append(watcher)
        return watch

    def drop(self, watcher: PathWatch, watch: int) -> None:
        watchers = self._watchers.get(watch, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers and self._watchers.pop(watch, None) is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    def _readable(self, _: int) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        watches: dict[int, None] = {}
        at = 0
        while at < len(data):
            watch, _mask, _cookie, length = _EVENT.unpack_from(data, at)
            watches[watch] = None
            at += _EVENT.size + length
        lost = OVERFLOW in watches  # events were dropped: every watcher has to look
        for watch in list(self._watchers) if lost else watches:
            for watcher in list(self._watchers.get(watch, ())):
                watcher.attempt(watcher.moved)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _is_directory(path: str) -> bool:
    """Test for a directory; `os.path.isdir` would take any error for a no."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116 - no pathlib on PID 1's path
    except (FileNotFoundError, NotADirectoryError):
        return False


class PathWatch:
    """Call back whenever something appears in the nearest existing directory above a path."""

    def __init__(
        self, inotify: Inotify, path: str, appeared: Callable[[], None], attempt: Callable[[Callable[[], None]], None]
    ) -> None:
        self._inotify, self._path, self._appeared = inotify, path, appeared
        self.attempt = attempt  # from the owner, so that one watcher's error does not affect the next
        self._watch = -1
        self._aim()

    def _aim(self) -> None:
        """Watch the deepest existing directory above the path.

        Between a look and its watch that directory may change without an event: look again, a bounded number of times,
        since a process may create and remove directories without end.
        """
        directory = self._nearest()
        for looks_left in range(MOST_LOOKS - 1, -1, -1):
            try:
                before, self._watch = self._watch, self._inotify.aim(self, directory)
            except (FileNotFoundError, NotADirectoryError):
                if not looks_left and self._watch < 0:
                    raise
                directory = self._nearest()
                continue
            if before >= 0:  # after the new one: the same directory has the same watch, which must stay
                self._inotify.drop(self, before)
            aimed, directory = directory, self._nearest()
            if directory == aimed:
                return

    def _nearest(self) -> str:
        directory = os.path.dirname(self._path)  # noqa: PTH120 - no pathlib on PID 1's path
        while directory not in ("", "/") and not _is_directory(directory):
            directory = os.path.dirname(directory)  # noqa: PTH120 - as above
        return directory or "/"

    def moved(self) -> None:
        """Look first, then aim the watch anew: a path that exists ends the probe, and the watch."""
        self._appeared()
        if self._watch >= 0:
            self._aim()
            self._appeared()  # it may have appeared before the new watch

    def close(self) -> None:
        if self._watch >= 0:
            self._inotify.drop(self, self._watch)
            self._watch = -1
