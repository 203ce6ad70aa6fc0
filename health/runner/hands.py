"""Forks that stay: what a run touches, a fork of its own would have to copy first, and that is most of what it costs.

A fork that has done a run, with nothing to say of it and nothing left of it, is free and is given the next: the
client's connection, the lease and the request. It looks at every file itself. One that has none for a while is let go.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

from gitsync.lease import Lease

# How long one waits for the next run, and how many may wait.
STAYS_S = 3.0
MOST_FREE = 4
# Runs of one fork: whatever they leave in its memory goes with it.
MOST_RUNS = 250
# Of a request, in one piece. A longer one gets a fork of its own.
LONGEST = 1 << 16
FREE = b"."


@dataclass(frozen=True, slots=True)
class Given:
    """As a hand finds it: descriptors that are its own."""

    client: int
    lease: int | None
    commit: str
    after_a_job: bool
    text: bytes


@dataclass(slots=True)
class Hand:
    door: socket.socket
    # When it was given its last run.
    since: float
    free: bool = False


def pair() -> tuple[socket.socket, socket.socket]:
    """The runner's end and the fork's. Its end is the hand's, too: a runner that is gone has no more runs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def take(door: socket.socket) -> Given | None:
    """None: there are no more."""
    text, found, _, _ = socket.recv_fds(door, LONGEST, 2, socket.MSG_CMSG_CLOEXEC)
    if not text:
        return None
    line, _, rest = text.partition(b"\n")
    after, _, commit = line.decode("ascii").partition(" ")
    return Given(found[0], found[1] if len(found) > 1 else None, commit, after == "1", rest)


class Hands:
    def __init__(self) -> None:
        self._hands: dict[int, Hand] = {}
        self._rest_at = float("inf")

    def began(self, pid: int, door: socket.socket) -> None:
        self._hands[pid] = Hand(door, time.monotonic())
        self._rest_at = min(self._rest_at, time.monotonic() + STAYS_S)

    def ended(self, pid: int) -> None:
        """Without its door it ends, if it has not."""
        if hand := self._hands.pop(pid, None):
            # Forks that are not its own may hold copies of the door.
            with contextlib.suppress(OSError):
                hand.door.shutdown(socket.SHUT_RDWR)
            hand.door.close()

    def give(self, client: int, text: bytes, held: Lease, *, after_a_job: bool) -> bool:
        """Whether one that is free has it."""
        message = f"{after_a_job:d} {held.commit}\n".encode() + text
        if len(message) > LONGEST:
            return False
        self._hear()
        for pid, hand in reversed(list(self._hands.items())):
            if not hand.free:
                continue
            try:
                socket.send_fds(hand.door, [message], [client] if held.fd is None else [client, held.fd])
            except OSError:
                # It was ended, and we have not heard of it yet.
                self.ended(pid)
                continue
            hand.free, hand.since = False, time.monotonic()
            return True
        return False

    def times(self) -> list[float]:
        return [self._rest_at] if self._hands else []

    def rest(self, now: float) -> None:
        """Lets those go that have had nothing to do for a while."""
        if now < self._rest_at:
            return
        self._rest_at = now + STAYS_S / 3
        self._hear()
        free = [pid for pid, hand in self._hands.items() if hand.free]
        for number, pid in enumerate(free):
            if number >= MOST_FREE or now - self._hands[pid].since >= STAYS_S:
                self.ended(pid)

    def _hear(self) -> None:
        for pid, hand in list(self._hands.items()):
            try:
                said = hand.door.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            if said:
                hand.free = True
            else:
                self.ended(pid)
