"""The one wait point: epoll, what to call for each descriptor, and timers."""

from __future__ import annotations

import select
import time
from heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

IN = select.EPOLLIN
OUT = select.EPOLLOUT


class Timer:
    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, tuple[int, Callable[[int], None]]] = {}  # with the registration's number
        self._registered = 0
        self._timers: list[Timer] = []

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._epoll.register(fd, mask)
        self._registered += 1
        self._calls[fd] = self._registered, call

    def change(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now() + seconds, call)
        heappush(self._timers, timer)
        return timer

    def wait(self, until: float | None) -> None:
        """Wait for the first thing to happen, and call whoever asked for it. Without anything due it waits for ever."""
        while self._timers and self._timers[0].call is None:
            heappop(self._timers)
        if self._timers and (until is None or self._timers[0].at < until):
            until = self._timers[0].at
        # Rounded up: a wait that ends a fraction early would only be made again.
        timeout = -1.0 if until is None else max(0.0, until - self.now() + 0.0005)
        events = self._epoll.poll(timeout)
        newest = self._registered
        for fd, mask in events:
            found = self._calls.get(fd)
            # An earlier call of this turn may have closed it, and another may have been given its number since: what
            # has come for that one is told again.
            if found is not None and found[0] <= newest:
                found[1](mask)
        now = self.now()
        while self._timers and self._timers[0].at <= now:
            due = heappop(self._timers).call
            if due is not None:
                due()
