"""Cache of replies that are equal for every client. The first request computes a reply; concurrent ones wait for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

# Bytes counted for an entry beside its reply, and the largest number of entries of any size.
OVERHEAD = 1024
MAX_ENTRIES = 4096


class Cache:
    """LRU cache bounded by bytes and by number of entries; keys are small. A failure (None) is not cached."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held = 0
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, bytes] = OrderedDict()
        self._making: dict[Hashable, Future[bytes | None]] = {}

    def get(self, key: Hashable, make: Callable[[], bytes | None]) -> tuple[bytes | None, bool]:
        """Return the reply, and whether this call computed it."""
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
        while self._held > self._room or len(self._made) > MAX_ENTRIES:
            _, old = self._made.popitem(last=False)
            self._held -= len(old) + OVERHEAD
