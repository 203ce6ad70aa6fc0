"""inotify: waiting for a path without asking again and again. The one place that needs it loads ctypes, late."""

from __future__ import annotations

import os

from init.poller import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.poller import Poller

CREATED, MOVED_IN, ATTRIBUTES, DELETED_SELF, MOVED_SELF = 0x100, 0x80, 0x4, 0x400, 0x800


class PathWatch:
    """Calls back whenever something appears in the nearest directory that exists on the way to a path."""

    def __init__(self, poller: Poller, path: str, appeared: Callable[[], None]) -> None:
        import ctypes

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._poller, self._path, self._appeared = poller, path, appeared
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watched = -1
        poller.add(self._fd, IN, self._readable)
        self.aim()

    def aim(self) -> None:
        """Watch the deepest existing directory above the path; the way to it may have grown."""
        directory = os.path.dirname(self._path)  # noqa: PTH120 - no pathlib on PID 1's path
        while directory not in ("", "/") and not os.path.isdir(directory):  # noqa: PTH112
            directory = os.path.dirname(directory)  # noqa: PTH120
        mask = CREATED | MOVED_IN | ATTRIBUTES | DELETED_SELF | MOVED_SELF
        watch: int = self._libc.inotify_add_watch(self._fd, (directory or "/").encode(), mask)
        if self._watched not in (-1, watch):
            self._libc.inotify_rm_watch(self._fd, self._watched)
        self._watched = watch

    def _readable(self, _: int) -> None:
        try:
            while os.read(self._fd, 4096):
                pass
        except BlockingIOError:
            pass
        self.aim()
        self._appeared()

    def close(self) -> None:
        self._poller.remove(self._fd)
        os.close(self._fd)
