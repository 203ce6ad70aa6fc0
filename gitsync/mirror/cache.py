"""Replies that are the same for everybody, made once: the first to ask makes it, the others wait for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

# What an entry costs beside its reply and the bytes of its key; and how many there are, whatever they cost.
OVERHEAD = 1024
MOST = 4096


class Cache:
    """Bounded by the bytes it holds and by number; keys are small. The longest unused goes first.

    A failure (None) is not kept.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held = 0
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, bytes] = OrderedDict()
        self._making: dict[Hashable, Future[bytes | None]] = {}

    def get(self, key: Hashable, make: Callable[[], bytes | None]) -> tuple[bytes | None, bool]:
        """The reply, and whether this call made it."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key], False
            waiting = self._making.get(key)
            if waiting is None:
                mine: Future[bytes | None] = Future()
                self._making[key] = mine
        if waiting is not None:
            return waiting.result(), False
        reply: bytes | None = None
        try:
            reply = make()
        finally:
            with self._lock:
                del self._making[key]
                if reply is not None:
                    self._keep(key, reply)
            mine.set_result(reply)
        return reply, True

    def _keep(self, key: Hashable, reply: bytes) -> None:
        if len(reply) + OVERHEAD > self._room:
            return
        self._made[key] = reply
        self._held += len(reply) + OVERHEAD
        while self._held > self._room or len(self._made) > MOST:
            _, old = self._made.popitem(last=False)
            self._held -= len(old) + OVERHEAD
