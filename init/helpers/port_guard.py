"""Keep one user of a pod from holding all connections that Slurm's daemons on other pods take.

slurmdbd takes 100 connections, and none of the daemons closes a silent one. They cannot tell one user of a pod from
another before a message comes, but this pod's kernel can. The processes of a user who is over a limit to one port of
one address for LOOKS looks are killed: those with such connections, and all of the user's where connections remain
without an owner in sight (an unreadable process, a descriptor on its way in a message). For WATCHED_S such a user has a
quarter of the limits, and one look. The pauses between looks are random: a user sees in /proc when the guard has run.

python3 -I -m init.helpers.port_guard
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ground.sockets import notify
from init.errors import InitError
from init.helpers.socket_guard import (
    CLOSED_S,
    KILL_S,
    LOOKS,
    UNUSED_USER,
    count_looks,
    kill_holders,
    list_trusted_users,
)
from init.pod.client import SOCKET, condition, log
from init.pod.pod import run_as

# A look costs the kernel 10 ms, whatever the number of connections: more often only while a user is over the limit.
# From the shortest pause to the longest.
QUIET_S, ALERT_S = (1.5, 6.0), (1.5, 2.5)
WATCHED_S = 300.0
SLURMCTLD, SLURMDBD, BOXES = 6817, 6819, 8652


class Limit(NamedTuple):
    """Connections of one user to one port of one address."""

    kept: int  # those that were there at the look before, too: a client's own is gone within a second
    every: int  # many clients side by side (`xargs -P 32 sacct`) have as many at every look, and are no attack


# slurmctld takes 8,192, slurmdbd 100, the black boxes 4 at a time; `minivm job` opens one to each of a job's workers.
LIMITS = {SLURMCTLD: Limit(1000, 1000), SLURMDBD: Limit(16, 64), BOXES: Limit(8, 16)}
NAMES = {SLURMCTLD: "slurmctld", SLURMDBD: "slurmdbd", BOXES: "the black boxes of a worker"}
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# Established connections, and those that wait for an answer: they take the daemon's queue.
ROW = re.compile(
    rb"^ *\d+: \S+ ([0-9A-F]+):(%s) 0[12] \S+ \S+ \S+ +(\d+) +\d+ (\d+) "
    % b"|".join(b"%04X" % port for port in LIMITS),
    re.MULTILINE,
)
MAPPED = b"0000000000000000FFFF0000"  # an IPv4 address in the table of IPv6
ANY = b""  # slurmdbd has the address of its pod and of its Service, of each family, and takes 100 connections in all

Peer = tuple[bytes, int]
Held = Mapping[tuple[int, Peer], set[int]]


def find_held(tables: Iterable[bytes]) -> Held:
    """Return the sockets (inodes) by their user and by where they lead: slurmdbd's addresses count together."""
    found: dict[tuple[int, Peer], set[int]] = defaultdict(set)
    for table in tables:
        for address, hex_port, user, inode in ROW.findall(table):
            port = int(hex_port, 16)
            found[int(user), (ANY if port == SLURMDBD else address.removeprefix(MAPPED), port)].add(int(inode))
    return found


def read_tables() -> list[bytes]:
    return [table.read_bytes() for table in TABLES if table.exists()]


class PortGuard:
    """Decides whose processes to kill, from what is held every few seconds."""

    def __init__(self, trusted: frozenset[int]) -> None:
        self.trusted = trusted
        self.looks: Counter[tuple[int, Peer]] = Counter()
        self.before: Held = {}
        self.watched: dict[int, tuple[float, int]] = {}  # user id -> when the watch ends, and the port

    def expire(self, now: float) -> bool:
        """Forget the users whose watch has ended; return whether there were any."""
        before = len(self.watched)
        self.watched = {user: watch for user, watch in self.watched.items() if watch[0] > now}
        return len(self.watched) < before

    @property
    def is_alert(self) -> bool:
        return bool(self.looks or self.watched)

    def is_over(self, user: int, peer: Peer, inodes: set[int]) -> bool:
        share = 4 if user in self.watched else 1
        limit = LIMITS[peer[1]]
        kept = inodes & self.before.get((user, peer), set())
        return len(kept) > limit.kept // share or len(inodes) > limit.every // share

    def look(self, sockets: Held, now: float) -> list[tuple[int, Peer]]:
        """Return the users over a limit for long enough, with the address and port."""
        over = [key for key, inodes in sockets.items() if key[0] not in self.trusted and self.is_over(*key, inodes)]
        self.before = sockets
        self.looks = count_looks(self.looks, over)
        ended = [key for key in over if key[0] in self.watched or self.looks[key] >= LOOKS]
        for key in ended:
            del self.looks[key]
            self.watched[key[0]] = now + WATCHED_S, key[1][1]
        return ended


def pause(*, is_alert: bool) -> float:
    return random.uniform(*(ALERT_S if is_alert else QUIET_S))


def kill_user(user: int) -> None:
    """Kill all of the user's processes in this pod, with that user's rights alone."""
    run_as(user, user, lambda: os.kill(-1, signal.SIGKILL), unused=UNUSED_USER, within=KILL_S)


class PortWatch:
    """Looks every few seconds, and kills."""

    def __init__(self, trusted: frozenset[int], control: Path) -> None:
        self.guard = PortGuard(trusted)
        self.control = control

    def look(self) -> None:
        now = time.monotonic()
        changed = self.guard.expire(now)
        before = set(self.guard.watched)
        sockets = find_held(read_tables())
        for user, peer in self.guard.look(sockets, now):
            inodes = sockets[user, peer]
            log(f"user id {user} holds {len(inodes):,} connections to {NAMES[peer[1]]}: the processes are killed")
            kill_holders(user, inodes)
            if not self.wait_until_closed(user, peer, inodes):
                log(f"user id {user} still holds connections to {NAMES[peer[1]]}: all the user's processes are killed")
                kill_user(user)
        if changed or set(self.guard.watched) != before:
            self.tell()

    def wait_until_closed(self, user: int, peer: Peer, inodes: set[int]) -> bool:
        """Wait for the kernel to close these sockets; new ones, of programs that start meanwhile, wait for a look."""
        until = time.monotonic() + CLOSED_S
        while find_held(read_tables()).get((user, peer), set()) & inodes:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def tell(self) -> None:
        text = "; ".join(
            f"user id {user} held too many connections to {NAMES[port]}, and has fewer for now"
            for user, (_, port) in sorted(self.guard.watched.items())
        )
        try:
            condition(self.control, "port-guard", text)
        except (InitError, EOFError) as error:
            log(str(error))


def main(control: Path = SOCKET) -> int:
    watch = PortWatch(list_trusted_users(), control)
    watch.tell()  # removes what an earlier guard told
    notify("READY=1")
    while True:
        try:
            watch.look()
        except OSError as error:
            log(f"the connections of this pod cannot be read: {error.strerror or error}")
        time.sleep(pause(is_alert=watch.guard.is_alert))


if __name__ == "__main__":
    raise SystemExit(main())
