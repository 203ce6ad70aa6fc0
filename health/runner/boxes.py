"""Give a job's black box to its user, root or an operator of Slurm, who asks over TCP with a credential.

The runner only accepts, a few connections a second: a fork answers each within some seconds, so that no asker holds
up a job's scripts.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from ground.sockets import read_line
from health import black_box, credentials, gpus
from health.places import Places

AT_ONCE = 4
APART_S = 0.1
RETRY_S = 5.0
HEAR_S = 2.0
ANSWER_S = 20
LONGEST = 16 * 1024
ASK_S = 5.0
LEVELS = ("Operator", "Administrator")
QUESTION = re.compile(r"minivm-box 1 (\d{1,10}) (\S{1,255})(?: ([0-9a-f]{32}))?", re.ASCII)


class BoxDoor:
    """The listening socket, and how many answers are under way. No socket where nothing could sign an answer."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._pids: set[int] = set()
        self._next_at = 0.0
        self._is_watched = False
        self._listener: socket.socket | None = None
        self._by = credentials.SLURM if os.environ.get("MINIVM_AUTH") == "slurm" else credentials.MUNGE
        can_sign = self._by == credentials.SLURM or os.access(credentials.UNMUNGED, os.X_OK)
        self._port = black_box.port() if can_sign else 0
        self._tell = tell
        self._has_told = False

    def _listen(self, now: float) -> None:
        """Try again later where the port is used: a fork of the runner before this one may hold it for a while."""
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        try:
            self._listener = socket.create_server(("", self._port), family=family, backlog=64, dualstack_ipv6=is_dual)
            self._listener.setblocking(False)
        except (OSError, OverflowError) as error:
            self._next_at = now + RETRY_S
            if not self._has_told:
                self._tell(f"minivm job shows no black boxes of this node: cannot listen on port {self._port}: {error}")
            self._has_told = True

    def times(self) -> list[float]:
        """Return when to watch for askers again, if that needs no child's end."""
        return [] if self._is_watched or not self._port or len(self._pids) >= AT_ONCE else [self._next_at]

    def serve(
        self, poll: select.poll, now: float, fork: Callable[[Callable[[], None], Callable[[int], None]], None]
    ) -> None:
        """Let a fork answer the next asker, and let the poll wake for askers only while one may be answered."""
        if self._listener is None and self._port and now >= self._next_at:
            self._listen(now)
        if self._listener is None:
            return
        if self._is_watched:
            self._next_at = now + APART_S  # also where no descriptor is left: the next look is not at once
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    fork(partial(answer, connection, self._by), self._pids.add)
        may = len(self._pids) < AT_ONCE and now >= self._next_at
        if may != self._is_watched:
            poll.register(self._listener, select.POLLIN) if may else poll.unregister(self._listener)
            self._is_watched = may

    def reaped(self, pid: int) -> None:
        self._pids.discard(pid)


def answer(connection: socket.socket, by: str) -> None:
    """Answer one asker, in a fork: an empty box where there is none, or none of that user's."""
    signal.alarm(ANSWER_S)  # sssd may be asked for a name, and answer after minutes
    fd = os.dup2(connection.detach(), 3)
    os.closerange(4, 1 << 20)  # clients of the runner see their ends only once no process holds their connections
    with socket.socket(fileno=fd) as own, contextlib.suppress(OSError, ValueError):
        own.setblocking(True)
        word = os.urandom(16).hex() if by == credentials.SLURM else None
        if word:
            own.sendall(f"{word}\n".encode())
        uid, text = credentials.unseal(read_line(own, HEAR_S, LONGEST), by)
        match = QUESTION.fullmatch(text.decode())
        if match is None or match[2] != os.environ.get("MINIVM_POD_NAME", "") or match[3] != word:
            return
        job = int(match[1])
        box = black_box.find(job, uid or None)
        if not box and uid and _is_operator(uid):
            box = black_box.find(job, None)
        deadline = time.monotonic() + HEAR_S
        own.settimeout(max(0.001, deadline - time.monotonic()))
        box = gpus.now_of(box, Places.from_environment().gpus, time.time()) + box
        own.sendall(credentials.seal(f"{text.decode()}\n".encode() + box, uid, by))


def _is_operator(uid: int) -> bool:
    from init.slurm import client

    try:
        argv = ["/usr/bin/sacctmgr", "-nP", "show", "user", f"name={pwd.getpwuid(uid).pw_name}", "format=adminlevel"]
        return client.run(argv, client.address(os.environ), within=ASK_S).strip() in LEVELS
    except (KeyError, client.SlurmError):
        return False
