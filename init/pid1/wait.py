"""The one wait: epoll, callbacks for descriptors, and timers.

An ordinary error (`init.errors.ORDINARY`) in a callback without an owner (`Scope`) is reported, and the callback
repeated a moment later: unread data stays, so nothing is lost.
"""

from __future__ import annotations

import os
import select
import time

from init.errors import ORDINARY, describe_error
from init.lean import heapq

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec

    Registered = tuple[int, Callable[[int], None]]  # its serial number and callback

    P = ParamSpec("P")

IN = select.EPOLLIN
OUT = select.EPOLLOUT
LONGEST = 86400.0  # seconds of one wait: the kernel counts milliseconds in 31 bits
MOMENT = 0.1  # seconds until a failed callback is repeated


class Timer:
    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Registered] = {}
        self._registered = 0
        self._masks: dict[int, int] = {}
        self._put_off: set[int] = set()  # descriptors ignored for a moment after a failed callback
        self._timers: list[Timer] = []
        self.waiting = False
        self.report_trouble: Callable[[str], None] = lambda _: None

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._register(fd, mask)
        self._registered += 1
        self._calls[fd] = self._registered, call
        self._masks[fd] = mask

    def _register(self, fd: int, mask: int) -> None:
        try:
            self._epoll.register(fd, mask)
        except FileExistsError:  # the kernel refused to remove it before
            self._epoll.modify(fd, mask)

    def change(self, fd: int, mask: int) -> None:
        """Change the events waited for; if the kernel refuses, retry a moment later."""
        self._masks[fd] = mask
        if fd not in self._put_off:
            try:
                self._epoll.modify(fd, mask)
            except OSError as error:
                self._again_later(fd, self._calls[fd], error)

    def remove(self, fd: int) -> None:
        if self._calls.pop(fd, None) is None:
            return
        del self._masks[fd]
        if fd in self._put_off:
            self._put_off.discard(fd)
            return
        try:
            self._epoll.unregister(fd)
        except OSError:
            return  # its close, or an ignored event, makes up for it

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        timer = Timer(self.now() + seconds, call)
        heapq.heappush(self._timers, timer)
        return timer

    def wait(self, until: float | None) -> None:
        """Wait for the next event or timer and call its callback; without any, wait for ever."""
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        if self._timers and (until is None or self._timers[0].at < until):
            until = self._timers[0].at
        # Rounded up: a wait that ends a fraction early would only be repeated.
        timeout = -1.0 if until is None else min(max(0.0, until - self.now() + 0.0005), LONGEST)
        newest = self._registered
        for fd, mask in self._events(timeout):
            registered = self._calls.get(fd)
            if registered is None:  # an earlier callback of this turn may have closed it
                self._unwatch(fd)
                continue
            if registered[0] > newest:  # the number was reused since: the new owner gets its events in the next turn
                continue
            try:
                registered[1](mask)
            except ORDINARY as error:
                self._again_later(fd, registered, error)
        now = self.now()
        while self._timers and self._timers[0].at <= now:
            due = heapq.heappop(self._timers).call
            if due is not None:
                try:
                    due()
                except ORDINARY as error:
                    self.report_trouble(f"{name_call(due)}: {describe_error(error)}")
                    self.after(MOMENT, due)

    # Errors.

    def _events(self, timeout: float) -> list[tuple[int, int]]:
        self.waiting = True
        try:
            return self._epoll.poll(timeout)
        except (OSError, MemoryError) as error:
            self.report_trouble(f"wait: {describe_error(error)}")
            time.sleep(MOMENT / 10)  # no event source now, so do not spin
            return []
        finally:
            self.waiting = False

    def _unwatch(self, fd: int) -> None:
        """Remove a descriptor that must not report events: it has no callback, or is ignored for a moment."""
        try:
            self._epoll.unregister(fd)
        except OSError:
            return

    def _again_later(self, fd: int, registered: Registered, error: BaseException) -> None:
        self.report_trouble(f"{name_call(registered[1])}: {describe_error(error)}")
        if self._calls.get(fd) is not registered or fd in self._put_off:
            return
        self._unwatch(fd)
        self._put_off.add(fd)
        self.after(MOMENT, lambda: self._look_again(fd, registered))

    def _look_again(self, fd: int, registered: Registered) -> None:
        if fd not in self._put_off or self._calls.get(fd) is not registered:
            return  # closed meanwhile
        self._register(fd, self._masks[fd])  # if this fails, this callback is repeated
        self._put_off.discard(fd)


def name_call(call: Callable[..., object]) -> str:
    return getattr(call, "__qualname__", repr(call)).replace(".<locals>.<lambda>", "")


def shut(fd: int) -> None:
    """Close a descriptor. Linux frees the number even when it reports an error, which is irrelevant here."""
    try:
        os.close(fd)
    except OSError:
        return


# Owners of callbacks: a service's probe, a connection. An error in a callback affects its owner alone.


class Scope:
    """The poller for one owner. `fails` gets the error of a callback and ends the owner's work.

    Callbacks without an owner belong to the core: the poller repeats them (`init.pid1.wait`).
    """

    def __init__(self, poller: Poller, fails: Callable[[str], None]) -> None:
        self._poller, self._fails = poller, fails
        self.change, self.remove, self.now = poller.change, poller.remove, poller.now

    def attempt(self, call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        try:
            call(*arguments, **named)
        except ORDINARY as error:
            self._fails(describe_error(error))

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._poller.add(fd, mask, lambda mask: self.attempt(call, mask))

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        return self._poller.after(seconds, lambda: self.attempt(call))
