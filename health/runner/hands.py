"""Forks that stay for further runs: a new fork would have to copy every page that a run touches, its main cost.

A fork whose run printed nothing and left nothing is free and gets the next run: the client's connection, the lease and
the request. It checks every file itself. A fork without work for a while is dismissed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

from gitsync.lease import Lease

# How long a fork waits for the next run, and how many may wait.
STAYS_S = 3.0
MOST_FREE = 4
# Runs per fork: it takes all memory that its runs leaked with it.
MOST_RUNS = 250
# Longest request in one message; a longer one gets a fork of its own.
LONGEST = 1 << 16
FREE = b"."


@dataclass(frozen=True, slots=True)
class Given:
    """A run as the fork receives it, with descriptors of its own."""

    client: int
    lease: int | None
    commit: str
    after_a_job: bool
    text: bytes


@dataclass(slots=True)
class Hand:
    door: socket.socket
    # When it got its last run.
    since: float
    free: bool = False


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the runner's end and the fork's end of a connection; the fork ends when the runner closes its end."""
    runner_end, fork_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner_end.setblocking(False)
    return runner_end, fork_end


def take(door: socket.socket) -> Given | None:
    """Receive the next run; None if there are no more."""
    text, descriptors, _, _ = socket.recv_fds(door, LONGEST, 2, socket.MSG_CMSG_CLOEXEC)
    if not text:
        return None
    line, _, rest = text.partition(b"\n")
    after, _, commit = line.decode("ascii").partition(" ")
    return Given(descriptors[0], descriptors[1] if len(descriptors) > 1 else None, commit, after == "1", rest)


class Hands:
    def __init__(self) -> None:
        self._hands: dict[int, Hand] = {}
        self._rest_at = float("inf")

    def began(self, pid: int, door: socket.socket) -> None:
        self._hands[pid] = Hand(door, time.monotonic())
        self._rest_at = min(self._rest_at, time.monotonic() + STAYS_S)

    def ended(self, pid: int) -> None:
        """Remove a fork; it ends when its connection is shut down."""
        if hand := self._hands.pop(pid, None):
            # Other forks may hold copies of this end.
            with contextlib.suppress(OSError):
                hand.door.shutdown(socket.SHUT_RDWR)
            hand.door.close()

    def give(self, client: int, text: bytes, held: Lease, *, after_a_job: bool) -> bool:
        """Give the run to a free fork; tell if one took it."""
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
                # It has ended, and the runner has not reaped it yet.
                self.ended(pid)
                continue
            hand.free, hand.since = False, time.monotonic()
            return True
        return False

    def times(self) -> list[float]:
        return [self._rest_at] if self._hands else []

    def rest(self, now: float) -> None:
        """Dismiss forks that had no work for a while."""
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
                message = hand.door.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                message = b""
            if message:
                hand.free = True
            else:
                self.ended(pid)
