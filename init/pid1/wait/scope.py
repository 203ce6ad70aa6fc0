"""Owners of callbacks: a service's probe, a connection. An error in a callback affects its owner alone."""

from __future__ import annotations

from init.errors import ORDINARY, in_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec

    from init.pid1.wait.poller import Poller, Timer

    P = ParamSpec("P")


class Scope:
    """The poller for one owner. `fails` gets the error of a callback and ends the owner's work.

    Callbacks without an owner belong to the core: the poller repeats them (`init.pid1.wait.poller`).
    """

    def __init__(self, poller: Poller, fails: Callable[[str], None]) -> None:
        self._poller, self._fails = poller, fails
        self.change, self.remove, self.now = poller.change, poller.remove, poller.now

    def attempt(self, call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        try:
            call(*arguments, **named)
        except ORDINARY as error:
            self._fails(in_words(error))

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._poller.add(fd, mask, lambda found: self.attempt(call, found))

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        return self._poller.after(seconds, lambda: self.attempt(call))
