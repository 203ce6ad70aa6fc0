"""The resident runner's server: accept runs from clients, and give each to a child (`health.runner.worker`).

One thread and one wait (`turn`), never blocked by a client: each has limited time to send its request, and a child
performs the run. The server itself reads and writes only small files of root. Between runs it reads ahead what the next
run needs, checks the node once after jobs ended (`CheckAfterJobs`), has a child write the notes of failed jobs
(`health.runner.failed`), and gives a job's black box to its user, root or an operator of Slurm (`BoxDoor`): it accepts
a few connections a second, and a fork answers each within some seconds, so that none holds up a job's scripts.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gitsync import lease
from gitsync.errors import GitsyncError
from gitsync.layout import Layout
from ground.errors import counted
from ground.files import write_if_possible
from ground.sockets import read_line
from health import black_box, credentials
from health.ask import ask_broker
from health.places import Places
from health.policy import RunnerPolicy
from health.runner import failed, gate, plan, record, worker
from health.runner.warm import FileCache, ImageScripts, Warm, read_policy
from health.runner.worker import Request, parse
from health.script import UNFIT, environment
from health.verdict import remove_cut_verdicts

# Delay after the first job's end, so that one check serves the jobs that end with it; and between two checks.
CHECK_DELAY_S = 1.0
CHECK_PAUSE_S = 10.0
CHECK_BUDGET_S = 45.0


class CheckAfterJobs:
    """The check of the node after jobs: once for all jobs that ended, while no job waits for the result."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._owed_at: float | None = None
        self._pid = 0
        self._began_at = float("-inf")
        self._is_put_off = False

    @property
    def is_owed(self) -> bool:
        """True while a job has ended that no finished check covers."""
        return self._owed_at is not None or self._pid != 0

    def owe(self, now: float) -> None:
        if self._owed_at is None:
            self._owed_at = max(now + CHECK_DELAY_S, self._began_at + CHECK_PAUSE_S)

    def times(self) -> list[float]:
        return [self._owed_at] if self._owed_at is not None and not self._pid else []

    def is_due(self, now: float) -> bool:
        return self._owed_at is not None and not self._pid and now >= self._owed_at

    def set_fork(self, pid: int, now: float) -> None:
        self._pid, self._owed_at, self._began_at = pid, None, now

    def put_off(self, now: float) -> bool:
        """Retry a check later that could not begin, was cut or failed; tell if this is the first failure."""
        is_first = not self._is_put_off
        self._is_put_off, self._owed_at = True, now + CHECK_PAUSE_S
        return is_first

    def note_end(self, pid: int, status: int, now: float) -> bool:
        """Record a child's end; tell if the check was cut or failed for the first time."""
        if pid != self._pid:
            return False
        self._pid = 0
        if status:  # killed for lack of memory, or failed: the node was not checked
            return self.put_off(now)
        self._is_put_off = False
        return False

    def work(self) -> None:
        """Run the epilog's checks, in a fork. A failed check drains the node through the broker, as in an epilog."""
        with lease.hold() as held:
            black_box.prune(read_policy(held.path, self._places, None).box_days, time.time())
            remove_cut_verdicts(self._places.verdicts, time.time())
            if not (held.path / "health.d").is_dir():
                return
            began = time.monotonic()
            env = environment("epilog", os.environ, held.commit, str(held.path), UNFIT)
            checked = gate.check("epilog", held.path, held.commit, env, CHECK_BUDGET_S, self._places)
            ask_broker({"ask": "look" if any(map(gate.stops_a_job, checked.problems)) else "ended"}, 0.5)
            result, broken = ("broken", [f"health.d: {checked.fault}"]) if checked.fault else ("ok", [])
            record.append(record.entry("after", "", held.commit, result, began, checks=checked.counts(), broken=broken))


# Time for a client to send its request, and the number of clients in that state.
REQUEST_S = 5.0
MOST_CALLS = 256
# Concurrent runs, more than a node has jobs that start and end at once; a client beyond it runs the scripts itself.
MOST_RUNS = 512
# Interval of the server's own look, so that the plan of task prologs is current.
READ_AHEAD_S = 15.0


@dataclass(slots=True)
class Call:
    """A client that is sending its request."""

    connection: socket.socket
    until: float
    text: bytearray = field(default_factory=bytearray)


class RunnerServer:
    """The server's state, and its one wait."""

    def __init__(self, listener: socket.socket, places: Places, layout: Layout, tell: Callable[[str], None]) -> None:
        self.places = places
        self.layout = layout
        self.cache = FileCache()
        self.image_scripts = ImageScripts(layout.zero, self.cache)
        self.after = CheckAfterJobs(places)
        self.failed = failed.FailedJobs()
        self.children = worker.SpareChildren()
        self.boxes = BoxDoor(tell)
        self.missed = 0
        self.stopping = False
        self._tell = tell
        self._listener = listener
        self._calls: dict[int, Call] = {}
        self._runs: set[int] = set()
        self._planned_from: object = None
        self._read_ahead_at = 0.0
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._wake, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._poll.register(self._wake, select.POLLIN)

    def _stop(self, number: int, frame: object) -> None:
        # Runs continue without the server: the children answer their clients themselves.
        self.stopping = True

    def turn(self) -> None:
        now = time.monotonic()
        times = [
            self._read_ahead_at,
            *(call.until for call in self._calls.values()),
            *self.after.times(),
            *self.failed.times(not self.after.is_owed),
            *self.children.times(),
            *self.boxes.times(),
        ]
        for fd, _ in self._poll.poll(max(0.0, min(times) - now) * 1000):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            elif (call := self._calls.get(fd)) is not None:
                self._receive(fd, call)
        self._reap()
        now = time.monotonic()
        self.boxes.serve(self._poll, now, self._fork)
        for fd in [fd for fd, call in self._calls.items() if call.until <= now]:
            self._hang_up(fd)
        if now >= self._read_ahead_at:
            self.read_ahead()
        self.children.dismiss_idle(now)
        if self.after.is_due(now):
            self._check_after_jobs(now)
        if self.failed.is_due(now, not self.after.is_owed):
            self._write_notes(now)

    def _check_after_jobs(self, now: float) -> None:
        try:
            gate.prepare()
            self._fork(self.after.work, lambda pid: self.after.set_fork(pid, now))
        except OSError as error:
            if self.after.put_off(now):
                self._tell(f"cannot check the node after a job, retrying: {error}")

    def _write_notes(self, now: float) -> None:
        jobs, dropped = self.failed.take(now), self.failed.dropped
        try:
            self._fork(partial(failed.tell, jobs, self.places, dropped), self.failed.set_fork)
            self.failed.dropped = 0
        except OSError as error:
            self._tell(f"{counted(len(jobs), 'output')} of failed jobs without a note: {error}")

    def read_ahead(self) -> None:
        """Read what changed, so that no run has to. An error here is harmless: each run reads by itself."""
        self._read_ahead_at = time.monotonic() + READ_AHEAD_S
        try:
            with lease.hold(self.layout) as held:
                self.cache.look()
                for kind in ("epilog", "prolog"):
                    self._read_for_run(kind, held)
                self._plan_task_prologs(held, read_policy(held.path, self.places, self.cache))
        except (OSError, GitsyncError, ValueError) as error:
            self._tell(f"cannot read ahead for the next run: {error}")
        black_box.trim_slurmd_log()
        self._count_missed()

    def _read_for_run(self, kind: str, held: lease.Lease) -> None:
        """Read what a run of this kind is about to need, except its policy."""
        tree = held.path
        if kind == "prolog":
            gate.look(kind, tree, held.commit, self.places, self.cache)
        for name in plan.scripts(tree, kind):
            self.image_scripts.step(tree, f"{kind}.d/{name}")

    def _plan_task_prologs(self, held: lease.Lease, policy: RunnerPolicy) -> None:
        link, files = plan.read_link(self.layout), plan.rests_on(self.places, held.path)
        current = held.commit, link, *map(plan.stamp, files)
        if current != self._planned_from:
            plan.write(self.places, self.layout, held.commit, policy)
            self._planned_from = current

    def _count_missed(self) -> None:
        if count := record.take_missed_count(self.places.runner):
            self.missed += count
            self.measure()
            self._tell(f"runs are taken again; {count} were missed")
            with contextlib.suppress(OSError):
                self._fork(record.report_recovery, lambda pid: None)

    def measure(self) -> None:
        write_if_possible(self.places.metrics.with_name("runner.prom"), record.format_missed_metric(self.missed))
        path = failed.metrics_path(self.places)
        if not path.exists():
            failed.write_counts(path, *failed.read_counts(path))

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (0, os.geteuid()) or len(self._calls) >= MOST_CALLS:
                connection.close()
                continue
            self._calls[connection.fileno()] = Call(connection, time.monotonic() + REQUEST_S)
            self._poll.register(connection, select.POLLIN)

    def _hang_up(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._calls.pop(fd).connection.close()

    def _receive(self, fd: int, call: Call) -> None:
        try:
            # With recv, the kernel closes descriptors that were passed along.
            text = call.connection.recv(1 << 18)
            call.text += text
            request = parse(call.text)
            if request is not None:
                self._begin(call, request)
            elif text:
                return
        except BlockingIOError:
            return
        except (OSError, ValueError, GitsyncError) as error:
            self._tell(f"a request was not taken: {error}")
        self._hang_up(fd)

    def _begin(self, call: Call, request: Request) -> None:
        with contextlib.suppress(BlockingIOError):
            # Readable before the answer means that the client has gone and performs the run itself.
            call.connection.recv(1)
            return
        self._count_missed()
        now = time.monotonic()
        after_a_job = self.after.is_owed
        if request.kind == "epilog":
            self.after.owe(now)
        with lease.hold(self.layout) as held:
            self.cache.look()
            policy = read_policy(held.path, self.places, self.cache)
            if request.kind == "prolog":
                self.failed.note_start(request.environment)
            if request.kind == "epilog" and policy.notes_failures:
                self.failed.note_end(request.environment, now, time.time())
            try:
                self._plan_task_prologs(held, policy)
            except OSError as error:
                self._tell(f"cannot plan task prologs: {error}")
            warm = Warm(
                self.places, self.cache, self.image_scripts, held, after_a_job=after_a_job, looked_at_later=True
            )
            client = call.connection.fileno()
            if self.children.give(client, bytes(call.text), held, after_a_job=after_a_job):
                return
            if len(self._runs) >= MOST_RUNS:  # a free fork would have taken it
                raise ValueError(f"{MOST_RUNS} runs are under way")
            self._read_for_run(request.kind, held)
            budget_s = policy.kind(request.kind).budget_s
            runner_end, fork_end = worker.make_channel()
            with fork_end:
                work = partial(worker.serve, fork_end, client, request, held, warm, budget_s, self.layout)
                self._fork(work, partial(self._add_run, runner_end))

    def _add_run(self, channel: socket.socket, pid: int) -> None:
        self._runs.add(pid)
        self.children.add(pid, channel)

    def _fork(self, work: Callable[[], None], began: Callable[[int], object]) -> None:
        sys.stderr.flush()
        began(worker.fork(work))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._runs.discard(pid)
            if self.after.note_end(pid, status, time.monotonic()):
                was_killed = os.WIFSIGNALED(status)
                how = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}" if was_killed else "failed"
                self._tell(f"the check of the node after a job {how}; retrying")
            self.failed.forget_fork(pid)
            self.boxes.forget_fork(pid)
            self.children.remove(pid)


BOXES_AT_ONCE = 4
BOXES_APART_S = 0.1
BOX_RETRY_S = 5.0
BOX_HEAR_S = 2.0
BOX_ANSWER_S = 20
LONGEST_BOX = 16 * 1024
BOX_ASK_S = 5.0
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
            self._next_at = now + BOX_RETRY_S
            if not self._has_told:
                self._tell(f"minivm job shows no black boxes of this node: cannot listen on port {self._port}: {error}")
            self._has_told = True

    def times(self) -> list[float]:
        """Return when to watch for askers again, if that needs no child's end."""
        return [] if self._is_watched or not self._port or len(self._pids) >= BOXES_AT_ONCE else [self._next_at]

    def serve(
        self, poll: select.poll, now: float, fork: Callable[[Callable[[], None], Callable[[int], None]], None]
    ) -> None:
        """Let a fork answer the next asker, and let the poll wake for askers only while one may be answered."""
        if self._listener is None and self._port and now >= self._next_at:
            self._listen(now)
        if self._listener is None:
            return
        if self._is_watched:
            self._next_at = now + BOXES_APART_S  # also where no descriptor is left: the next look is not at once
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    fork(partial(answer_box_request, connection, self._by), self._pids.add)
        may = len(self._pids) < BOXES_AT_ONCE and now >= self._next_at
        if may != self._is_watched:
            poll.register(self._listener, select.POLLIN) if may else poll.unregister(self._listener)
            self._is_watched = may

    def forget_fork(self, pid: int) -> None:
        self._pids.discard(pid)


def answer_box_request(connection: socket.socket, by: str) -> None:
    """Answer one asker, in a fork: an empty box where there is none, or none of that user's."""
    from health import tasks  # imported late: the server itself does without Slurm's clients

    signal.alarm(BOX_ANSWER_S)  # sssd may be asked for a name, and answer after minutes
    fd = os.dup2(connection.detach(), 3)
    os.closerange(4, 1 << 20)  # clients of the runner see their ends only once no process holds their connections
    with socket.socket(fileno=fd) as own, contextlib.suppress(OSError, ValueError):
        own.setblocking(True)
        word = os.urandom(16).hex() if by == credentials.SLURM else None
        if word:
            own.sendall(f"{word}\n".encode())
        uid, text = credentials.unseal(read_line(own, BOX_HEAR_S, LONGEST_BOX), by)
        match = QUESTION.fullmatch(text.decode())
        if match is None or match[2] != os.environ.get("MINIVM_POD_NAME", "") or match[3] != word:
            return
        job = int(match[1])
        box = black_box.find(job, uid or None)
        if not box and uid and _is_operator(uid):
            box = black_box.find(job, None)
        box = tasks.lead(box, job, match[2])
        deadline = time.monotonic() + BOX_HEAR_S
        own.settimeout(max(0.001, deadline - time.monotonic()))
        own.sendall(credentials.seal(f"{text.decode()}\n".encode() + box, uid, by))


def _is_operator(uid: int) -> bool:
    from init.slurm import client

    try:
        argv = ["/usr/bin/sacctmgr", "-nP", "show", "user", f"name={pwd.getpwuid(uid).pw_name}", "format=adminlevel"]
        return client.run(argv, client.address(os.environ), within=BOX_ASK_S).strip() in LEVELS
    except (KeyError, client.SlurmError):
        return False
