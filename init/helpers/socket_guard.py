"""Keep one user from holding all connections to the socket of munged or sackd.

Both answer any user of the pod, and neither closes a silent connection in time: munged reads from as many connections
as it has threads, sackd takes 50 (24.11) or 512 (26.05) of them. A user who holds LIMIT connections for LOOKS looks is
blocked for BLOCKED_S by an ACL on the socket's directory, and that user's processes that held them in all looks are
killed. Where connections remain, or come back (an open descriptor of the socket's file needs no directory), the daemon
is restarted, which ends them, but fails other users' commands for a moment.
Where all users together hold CROWD, SHARE connections are enough. Only the user with the most connections is blocked at
a time: other users' requests may be waiting because of that user.

The pauses between looks are random: a user sees in /proc when the guard has run.

python3 -I -m init.helpers.socket_guard SERVICE SOCKET
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import random
import signal
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ground.sockets import notify
from init.errors import InitError
from init.pod.client import SOCKET, Client, condition, log
from init.pod.pod import run_as

EVERY_S = 1.0  # on average
LIMIT, LOOKS = 10, 3
# Several users together fill sackd (50) or munged (64 threads) with fewer each. A request takes milliseconds.
CROWD, SHARE = 30, 4
BLOCKED_S = 300.0
# Connections of a blocked user that remain (to another pod's socket, in the host's network) cause no restart sooner.
AGAIN_S = 60.0
# Their own users: slurmctld, slurmd and slurmstepd ask too.
TRUSTED = ("root", "slurm", "munge")
CANNOT = 78  # no restart helps
# A user may have thousands of processes with thousands of descriptors each: then the restart is quicker.
KILL_S, MOST_GROUPS = 2, 4
CLOSED_S = 1.0  # for the kernel to close what a killed process held
UNUSED_USER = 64999  # of the reserved ids: no process runs as it

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
SHOW_NAME, SHOW_PEER, SHOW_UID = 0x01, 0x04, 0x40
NAME, PEER, UID = 0, 2, 7
ESTABLISHED = 1
HEADER, MESSAGE, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBIQ"), struct.Struct("=HH")

# linux/posix_acl_xattr.h
ACL = "system.posix_acl_access"
ACL_VERSION = struct.pack("<I", 2)
ACL_ENTRY = struct.Struct("<HHI")
USER_OWNER, USER, GROUP_OWNER, MASK, OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
NOBODY_IN_PARTICULAR = 0xFFFFFFFF


def dump() -> Iterator[bytes]:
    """Ask the kernel for all connected unix sockets of this network namespace; yield its messages."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(5)
        body = struct.pack("=BBHIIIQ", socket.AF_UNIX, 0, 0, 1 << ESTABLISHED, 0, SHOW_NAME | SHOW_PEER | SHOW_UID, 0)
        kernel.send(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + body)
        while True:
            data = kernel.recv(1 << 20)
            while len(data) >= HEADER.size:
                length, kind, *_ = HEADER.unpack_from(data)
                if kind == NLMSG_DONE or length < HEADER.size:
                    return
                message, data = data[HEADER.size : length], data[(length + 3) & ~3 :]
                if kind == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", message)[0]
                    raise OSError(number, os.strerror(number))
                yield message


def attributes(message: bytes) -> dict[int, bytes]:
    values: dict[int, bytes] = {}
    at = MESSAGE.size
    while at + ATTRIBUTE.size <= len(message):
        length, kind = ATTRIBUTE.unpack_from(message, at)
        if length < ATTRIBUTE.size:
            break
        values[kind] = message[at + ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return values


def connections(messages: Iterable[bytes], path: str) -> dict[int, int]:
    """Return the user of each client's socket (its inode) with an accepted connection to the socket."""
    path_bytes = os.fsencode(path)
    owners: dict[int, int] = {}
    clients: list[int] = []
    for message in messages:
        inode, fields = MESSAGE.unpack_from(message)[4], attributes(message)
        if PEER in fields and fields.get(NAME, b"").rstrip(b"\0") == path_bytes:
            clients.append(struct.unpack("=I", fields[PEER])[0])
        if UID in fields:  # a client may have bound its socket to a name too
            owners[inode] = struct.unpack("=I", fields[UID])[0]
    return {client: owners[client] for client in clients if client in owners}


def kill_holders(user: int, inodes: set[int]) -> None:
    """Kill the user's processes that hold these sockets, with that user's rights alone.

    The kernel shows a process's descriptors to its own user and group. A child takes both on, so it can end no other
    user's process. What takes longer than KILL_S is left.
    """
    processes = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if owner(pid, "Uid:") == user]  # noqa: PTH208
    groups = {group for pid in processes if (group := owner(pid, "Gid:")) is not None}

    def kill() -> None:
        for pid in processes:
            kill_if_holder(pid, inodes)

    for group in sorted(groups)[:MOST_GROUPS]:
        run_as(user, group, kill, unused=UNUSED_USER, within=KILL_S)


def owner(pid: int, line: str) -> int | None:
    """Return the effective user (`Uid:`) or group (`Gid:`) of a process; None for one that has ended."""
    with contextlib.suppress(OSError):
        for text in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if text.startswith(line):
                return int(text.split()[2])
    return None


def kill_if_holder(pid: int, inodes: set[int]) -> None:
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # before the look: the number may belong to another process afterwards
        try:
            if any(is_held(descriptor, inodes) for descriptor in Path(f"/proc/{pid}/fd").iterdir()):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


Counted = TypeVar("Counted")


def count_looks(looks: Counter[Counted], over_limit: Iterable[Counted]) -> Counter[Counted]:
    """Count the looks over the limit, LOOKS at most.

    A look under the limit takes back one over it, so that letting go at every third look hides nothing.
    """
    fewer = {key: number - 1 for key, number in looks.items() if number > 1}
    return Counter(fewer | {key: min(LOOKS, looks[key] + 1) for key in over_limit})


def is_held(descriptor: Path, inodes: set[int]) -> bool:
    with contextlib.suppress(OSError):  # closed since
        name, _, number = str(descriptor.readlink()).partition(":")
        return name == "socket" and int(number.strip("[]")) in inodes
    return False


class Guard:
    """Decides which user to block, from counts that are taken every second."""

    def __init__(self, trusted: frozenset[int]) -> None:
        self.trusted = trusted
        self.looks: Counter[int] = Counter()
        self.blocked: dict[int, float] = {}  # user id -> when the block ends

    def expire(self, now: float) -> bool:
        """Forget blocks that have ended; return whether there were any."""
        ended = [user for user, until in self.blocked.items() if until <= now]
        for user in ended:
            del self.blocked[user]
        return bool(ended)

    def look(self, counts: Counter[int], now: float) -> tuple[int, int] | None:
        """Return the user to block and the number of connections, or None."""
        passed = self.trusted | {user for user, until in self.blocked.items() if until - now > BLOCKED_S - AGAIN_S}
        counted = {user: number for user, number in counts.items() if user not in passed}
        limit = SHARE if sum(counted.values()) >= CROWD else LIMIT
        over_limit = {user: number for user, number in counted.items() if number >= limit}
        self.looks = count_looks(self.looks, over_limit)
        user = max(over_limit, key=lambda user: over_limit[user], default=None)
        if user is None or self.looks[user] < LOOKS:
            return None
        self.looks.clear()
        self.blocked[user] = now + BLOCKED_S
        return user, over_limit[user]


def write_acl(directory: Path, users: Iterable[int]) -> None:
    """Deny the directory to these users alone; with none of them, remove the ACL."""
    mode = directory.stat().st_mode
    denied = [(USER, 0, user) for user in sorted(users)]
    if not denied:
        try:
            os.removexattr(directory, ACL)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
        return
    # The group's bits of the mode are the mask: they stay as they are.
    owner, group, other = (mode >> 6) & 7, (mode >> 3) & 7, mode & 7
    entries = [(USER_OWNER, owner, NOBODY_IN_PARTICULAR), *denied, (GROUP_OWNER, group, NOBODY_IN_PARTICULAR)]
    entries += [(MASK, group, NOBODY_IN_PARTICULAR), (OTHER, other, NOBODY_IN_PARTICULAR)]
    os.setxattr(directory, ACL, ACL_VERSION + b"".join(ACL_ENTRY.pack(*entry) for entry in entries))


def list_trusted_users() -> frozenset[int]:
    def number(name: str) -> int:
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            return 0

    return frozenset(map(number, TRUSTED))


class SocketWatch:
    """Looks every second, and blocks by the ACL and a restart of the daemon."""

    def __init__(self, service: str, path: Path, control: Path) -> None:
        self.service, self.path, self.control = service, path, control
        self.guard = Guard(list_trusted_users())
        self.seen: deque[set[int]] = deque(maxlen=LOOKS)  # the clients' sockets of the last looks

    def look(self) -> None:
        now = time.monotonic()
        if self.guard.expire(now):
            self.apply()
        clients = connections(dump(), str(self.path))
        self.seen.append(set(clients))
        were_blocked = set(self.guard.blocked)
        blocked = self.guard.look(Counter(clients.values()), now)
        if blocked is None:
            return
        user, number = blocked
        log(f"user id {user} holds {number:,} connections to {self.service}: blocked for {BLOCKED_S:g} s")
        if not self.apply():
            return
        if user and user not in were_blocked and self.kill_and_wait(user):
            # The user may still come back by a descriptor, and is looked at for that from now on.
            self.guard.blocked[user] = now + BLOCKED_S - AGAIN_S
            return
        log(f"user id {user} still holds connections: {self.service} is restarted")
        try:
            with Client(self.control) as client:
                client.request("restart", service=self.service, wait=False)
        except (InitError, EOFError) as error:
            log(f"restart of {self.service}: {error}")

    def kill_and_wait(self, user: int) -> bool:
        """Kill the processes that held connections in all looks; return whether few of the user's remain.

        Short requests of a busy user are in one look alone: their programs stay.
        """
        kill_holders(user, self.list_held_by(user).intersection(*self.seen))
        until = time.monotonic() + CLOSED_S
        while (remaining := len(self.list_held_by(user))) >= SHARE and time.monotonic() < until:
            time.sleep(0.05)
        return remaining < SHARE

    def list_held_by(self, user: int) -> set[int]:
        return {inode for inode, holder in connections(dump(), str(self.path)).items() if holder == user}

    def apply(self) -> bool:
        """Write the ACL, and the condition of the pod; return whether the directory took the ACL."""
        users = ", ".join(f"user id {user}" for user in sorted(self.guard.blocked))
        text = f"{users} held all connections to {self.service}, and may not use it for now" if users else ""
        applied = True
        try:
            write_acl(self.path.parent, self.guard.blocked)
        except OSError as error:
            applied = False
            text = f"{self.path.parent} takes no ACL: {users} cannot be kept from {self.service} ({error.strerror})"
        try:
            condition(self.control, f"{self.service}-guard", text)
        except (InitError, EOFError) as error:
            log(str(error))
        return applied


def pause() -> float:
    return random.uniform(EVERY_S / 2, EVERY_S * 3 / 2)


def main(service: str, path: Path, control: Path = SOCKET) -> int:
    watch = SocketWatch(service, path, control)
    watch.apply()  # removes what an earlier guard blocked
    try:
        sum(1 for _ in dump())
    except OSError as error:
        log(f"the kernel does not list unix sockets ({error.strerror}): {service} is not guarded")
        return CANNOT
    notify("READY=1")
    while True:
        try:
            watch.look()
        except OSError as error:
            log(f"the kernel did not list its unix sockets: {error.strerror or error}")
        time.sleep(pause())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
