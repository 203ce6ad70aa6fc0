"""Children of the resident runner: fork one for a run, and keep it for further runs.

A child shares nothing with the runner but what the runner had read before the fork. It speaks the protocol with the
client itself (see "Protocol"): it accepts the run, waits for the client's "go", performs the run and sends the answer.

A new child must copy every page of memory that a run touches; this is the main cost of a run. So a child whose run
printed nothing and left nothing behind reports that it is free, and the server hands it the next run: the client's
connection, the lease and the request, over a socket of its own (`SpareChildren`). The child checks every file itself.
The server dismisses a child that is free for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType

from gitsync.layout import Layout
from gitsync.lease import Lease
from health.runner import run as runner
from health.runner.warm import Stopped, Warm, is_whole, read_policy

# Descriptors in the child, above the standard three: the client's connection, the source of further runs, and the
# lease.
CLIENT, CHANNEL, LEASE = 3, 4, 5
GO_S = 5.0
# Collect reference cycles after so many runs, once the last run's client has its answer.
COLLECT_EVERY = 10


def fork(work: Callable[[], None]) -> int:
    """Fork and run `work` in the child; return the child's pid. OSError if no process can be created."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A collection would copy the pages that it visits. A fork that stays collects between runs.
        gc.disable()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _stop)
        work()
        code = 0
    except Stopped:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def serve(
    channel: socket.socket, client: int, request: Request, held: Lease, warm: Warm, budget_s: float, layout: Layout
) -> None:
    """Serve a run whose client waits for the end, then further runs. Does nothing until the client's "go"."""
    null = os.open("/dev/null", os.O_RDONLY)
    # Copy to numbers above the targets first, so that dup2 overwrites none of them.
    output = os.memfd_create("output")
    lease = [] if held.fd is None else [held.fd]
    high = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, output, output, client, channel.detach(), *lease)
    ]
    for place, fd in enumerate(high):
        os.dup2(fd, place, inheritable=place < CLIENT)
    # Close other clients' connections too: a client notices its end only if no process holds it.
    os.closerange(len(high), 1 << 20)
    # Objects of the runner are never garbage here.
    gc.freeze()
    own = Lease(held.commit, held.path, LEASE if lease else None)
    with contextlib.suppress(OSError):
        _serve_all(CurrentRun(request, replace(warm, held=own), budget_s), layout)


@dataclass(frozen=True, slots=True)
class CurrentRun:
    request: Request
    warm: Warm
    budget_s: float


def _serve_all(current: CurrentRun | None, layout: Layout) -> None:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, CHANNEL)
    number = 0
    while current and (answer := _serve(current)):
        number += 1
        # Before the client learns of the end, so that the next run finds this process.
        is_spare = number < MOST_RUNS and _is_unchanged() and _report_free(channel)
        os.write(CLIENT, answer)
        os.close(CLIENT)
        if not is_spare:
            return
        if number % COLLECT_EVERY == 0:
            gc.collect()
        current = _wait_for_run(channel, current.warm, layout)


def _report_free(channel: socket.socket) -> bool:
    try:
        return channel.send(FREE) > 0
    except OSError:
        # The runner is gone; the current run continues.
        return False


def _wait_for_run(channel: socket.socket, warm: Warm, layout: Layout) -> CurrentRun | None:
    received = receive_run(channel)
    if received is None:
        return None
    _move_descriptor(received.client, CLIENT)
    held_lease = Lease(received.commit, layout.tree(received.commit), None)
    if received.lease is not None:
        _move_descriptor(received.lease, LEASE)
        held_lease.fd = LEASE
    request, cache = parse(received.text), warm.cache
    if request is None or cache is None:
        return None
    cache.look()
    budget_s = read_policy(held_lease.path, warm.places, cache).kind(request.kind).budget_s
    return CurrentRun(request, replace(warm, held=held_lease, after_a_job=received.after_a_job), budget_s)


def _move_descriptor(fd: int, place: int) -> None:
    """Give the descriptor this number."""
    if fd != place:
        os.dup2(fd, place, inheritable=False)
        os.close(fd)


def _is_unchanged() -> bool:
    """Tell if the last run printed nothing, no step was cut or failed, and no process of it remains."""
    if not is_whole():
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return os.fstat(2).st_size == 0
    return False


def _serve(current: CurrentRun) -> bytes:
    """Perform one run and return its answer; empty if the client did not ask for it."""
    os.set_blocking(CLIENT, True)
    os.write(CLIENT, encode_acceptance(current.budget_s))
    if not select.select([CLIENT], [], [], GO_S)[0] or os.read(CLIENT, 1) != b"G":
        return b""
    with _StopOnHangUp():
        code = runner.perform(current.request.kind, current.request.environment, current.warm)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return encode_end(code, _collect_output())


def _collect_output() -> bytes:
    """Return what the run printed, for the client to print."""
    size = os.fstat(2).st_size
    return os.pread(2, LONGEST_TEXT, max(0, size - LONGEST_TEXT))


class _StopOnHangUp:
    """Stop the run when its client ends, as slurmd does when it gives a run up; the current script ends too."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGIO, self._look)
        fcntl.fcntl(CLIENT, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(CLIENT, fcntl.F_SETFL, fcntl.fcntl(CLIENT, fcntl.F_GETFL) | os.O_ASYNC)
        self._look()

    @staticmethod
    def _look(*_: object) -> None:
        # A client sends nothing more: readable means that it has closed the connection.
        if select.select([CLIENT], [], [], 0)[0]:
            raise Stopped

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)


# Children that stay for further runs.

# How long a child waits for the next run, and how many may wait.
SPARE_S = 3.0
MOST_FREE = 4
# Runs per child: its end frees all memory that its runs leaked.
MOST_RUNS = 250
# Longest request in one message; a longer one gets a new child.
LONGEST = 1 << 16
FREE = b"."


@dataclass(frozen=True, slots=True)
class HandedRun:
    """A further run as a child receives it, with descriptors of its own."""

    client: int
    lease: int | None
    commit: str
    after_a_job: bool
    text: bytes


@dataclass(slots=True)
class SpareChild:
    channel: socket.socket  # the server's end
    busy_since: float  # when it got its last run
    is_free: bool = False


def make_channel() -> tuple[socket.socket, socket.socket]:
    """Return the runner's end and the fork's end of a connection; the fork ends when the runner closes its end."""
    runner_end, fork_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner_end.setblocking(False)
    return runner_end, fork_end


def receive_run(channel: socket.socket) -> HandedRun | None:
    """Receive the next run; None if there are no more."""
    text, descriptors, _, _ = socket.recv_fds(channel, LONGEST, 2, socket.MSG_CMSG_CLOEXEC)
    if not text:
        return None
    line, _, rest = text.partition(b"\n")
    after, _, commit = line.decode("ascii").partition(" ")
    return HandedRun(descriptors[0], descriptors[1] if len(descriptors) > 1 else None, commit, after == "1", rest)


class SpareChildren:
    """The server's side: which child is free, and the channel to each."""

    def __init__(self) -> None:
        self._children: dict[int, SpareChild] = {}
        self._dismiss_at = float("inf")

    def add(self, pid: int, channel: socket.socket) -> None:
        self._children[pid] = SpareChild(channel, time.monotonic())
        self._dismiss_at = min(self._dismiss_at, time.monotonic() + SPARE_S)

    def remove(self, pid: int) -> None:
        """Remove a fork; it ends when its connection is shut down."""
        if child := self._children.pop(pid, None):
            # Other forks may hold copies of this end.
            with contextlib.suppress(OSError):
                child.channel.shutdown(socket.SHUT_RDWR)
            child.channel.close()

    def give(self, client: int, text: bytes, held: Lease, *, after_a_job: bool) -> bool:
        """Give the run to a free fork; tell if one took it."""
        message = f"{after_a_job:d} {held.commit}\n".encode() + text
        if len(message) > LONGEST:
            return False
        self._receive_reports()
        for pid, child in reversed(list(self._children.items())):
            if not child.is_free:
                continue
            try:
                socket.send_fds(child.channel, [message], [client] if held.fd is None else [client, held.fd])
            except OSError:
                # It has ended, and the runner has not reaped it yet.
                self.remove(pid)
                continue
            child.is_free, child.busy_since = False, time.monotonic()
            return True
        return False

    def times(self) -> list[float]:
        return [self._dismiss_at] if self._children else []

    def dismiss_idle(self, now: float) -> None:
        """Dismiss forks that had no work for a while."""
        if now < self._dismiss_at:
            return
        self._dismiss_at = now + SPARE_S / 3
        self._receive_reports()
        free = [pid for pid, child in self._children.items() if child.is_free]
        for number, pid in enumerate(free):
            if number >= MOST_FREE or now - self._children[pid].busy_since >= SPARE_S:
                self.remove(pid)

    def _receive_reports(self) -> None:
        for pid, child in list(self._children.items()):
            try:
                message = child.channel.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                message = b""
            if message:
                child.is_free = True
            else:
                self.remove(pid)


# Protocol between a client and the resident runner.
#
#
# A client sends a line and the variables of its environment. The child that will do the run answers "A" and the run's
# budget in milliseconds; on the client's "G" it does the run, then sends the exit code and the text to print. No
# descriptor is passed: slurmd waits for the end of its pipe, which a hung runner would hold. The other end is
# images/src/runner/client.c.


# Not the task prolog: it belongs to the user, and no root process runs it.
KINDS = ("prolog", "epilog", "health")
LONGEST_LINE = 64
LONGEST_TEXT = 32 * 1024
LONGEST_REQUEST = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    kind: str
    environment: Mapping[str, str]


def parse(text: bytes | bytearray) -> Request | None:
    """Parse a request; None while it is incomplete; ValueError for anything that the client never sends."""
    line, end, _ = bytes(text[:LONGEST_LINE]).partition(b"\n")
    if not end:
        if len(text) >= LONGEST_LINE:
            raise ValueError("no first line")
        return None
    words = line.decode("ascii").split(" ")
    if len(words) != 4 or words[:2] != ["minivm", "1"] or words[2] not in KINDS or not words[3].isdecimal():
        raise ValueError(f"wanted 'minivm 1 KIND SIZE', not {line!r}")
    size = int(words[3])
    if size > LONGEST_REQUEST:
        raise ValueError(f"{size} bytes are too many")
    if (missing := len(text) - len(line) - 1 - size) < 0:
        return None
    if missing:
        raise ValueError("more than was announced")
    variables = bytes(text[len(line) + 1 :]).split(b"\0")
    if variables.pop():
        raise ValueError("the last variable has no end")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return Request(words[2], {name: value for name, equals, value in pairs if name and equals})


def encode_acceptance(budget_s: float) -> bytes:
    return b"A" + min(int(budget_s * 1000), 2**31).to_bytes(4, "little")


def encode_end(code: int, text: bytes) -> bytes:
    """Encode the end of a run with the end of its output."""
    output = text[-LONGEST_TEXT:]
    return bytes([code]) + len(output).to_bytes(2, "little") + output
