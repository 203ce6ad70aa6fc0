"""PID 1 at work: one thread, one wait. It turns what happens into events and does what the engine decides."""

from __future__ import annotations

import gc
import os

from init import procs
from init.engine import DRAIN, Condition, Engine, PodPhase
from init.errors import ConfigError
from init.lean import signal
from init.logs import Logs
from init.owners import Owners
from init.poller import IN, Poller
from init.procs import Streams
from init.records import record
from init.service import Probe
from init.states import (
    MAIN,
    STOPPER,
    Exited,
    Kill,
    Spawn,
    Spawned,
    SpawnFailed,
    Told,
    Unwatch,
    Watch,
)  # fmt: skip
from init.trace import Trace
from init.watches import Watches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.engine import Todo
    from init.notify import Notify
    from init.plan import Plan
    from init.service import Service
    from init.states import Event

EX_CONFIG = 78  # docs/reference/exit-codes.md
LAST_WORDS = 2.0  # seconds that a slow log reader gets at the end


@record(frozen=True, slots=True)
class Settings:
    """The pod's environment, read once."""

    run: str
    http: str
    grace: float
    as_json: bool
    pod: str
    syslog: str
    env: Mapping[str, str]
    began: float  # monotonic, when the process was entered


class Init:
    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.settings = settings
        self.poller = Poller()
        self.owners = Owners()
        self.reaped = 0
        self.turns = 0
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._todo: Todo = []
        self._performing = False
        self._waits: dict[int, Callable[[str], None]] = {}  # children that are not a service's: probes, reloads
        self._pidfds: dict[int, int] = {}
        self._sessions: dict[str, int] = {}
        self.childless = False
        self.after_turn: list[Callable[[], None]] = [self._forget_removed]
        self.logs_to_forget: set[str] = set()
        self.trace = Trace()
        self.engine = Engine(plan, settings.grace, luck, self.trace)
        self.logs = Logs(self.poller, 1, as_json=settings.as_json, troubled=self._log_trouble)
        self._watches = Watches(self)
        self._signals()
        self.notify: Notify | None = None

    # Life.

    def run(self) -> int:
        """Start everything, and come back with the exit code when all of it has stopped."""
        self.perform(self.engine.begin(self.settings.began))
        self._open()
        gc.freeze()  # what is there stays there; a collection in a child would only copy its pages
        gc.enable()
        while self.engine.phase is not PodPhase.STOPPED:
            self.turn(self.engine.next_wake())
            now = self.poller.now()
            wake = self.engine.next_wake()
            if wake is not None and wake <= now:
                self.perform(self.engine.tick(now))
            for call in self.after_turn:
                call()
        from init.sweep import sweep

        sweep(self)
        if self.engine.why_ended:
            self.say(f"ended: {self.engine.why_ended}")
        self.logs.close(LAST_WORDS)
        return self.engine.exit_code

    def _open(self) -> None:
        """Everything that the first services need not wait for: callers, syslog, probes of the kubelet."""
        from init.control import Control
        from init.requests import Requests

        self._notify_path()
        self._syslog()
        if self.settings.http:
            from init.pages import pages
            from init.server import Server, listen

            try:
                Server(self.poller, listen(self.settings.http), pages(self))
            except ConfigError as error:
                self.say(str(error))
                self.perform(self.engine.terminate(self.poller.now(), EX_CONFIG, str(error), drain=False))
        Control(f"{self.settings.run}/control.sock", self.poller, Requests(self).handle)

    def _notify_path(self) -> str:
        from init.notify import Notify

        if self.notify is None:
            path = f"{self.settings.run}/notify.sock"
            self.notify = Notify(path, self.poller, self.owners, self._spec, self._told, self.say)
        return self.notify.path

    def turn(self, until: float | None) -> None:
        self.poller.wait(until)
        self.turns += 1

    def say(self, text: str) -> None:
        self.logs.say(text)
        self.logs.flush()

    def feed(self, name: str, event: Event) -> None:
        self.perform(self.engine.feed(name, event, self.poller.now()))

    def perform(self, todo: Todo) -> None:
        """Do what was decided, in order. An action's own event may decide more: that comes after it."""
        self._todo += todo
        if self._performing:
            return
        self._performing = True
        try:
            while self._todo:
                name, action = self._todo.pop(0)
                match action:
                    case Spawn():
                        self._spawn(name, action.step)
                    case Kill():
                        self.kill(action.pid, action.signal)
                    case Watch():
                        self._watches.begin(name)
                    case Unwatch():
                        self._watches.end(name)
        finally:
            self._performing = False

    # Processes.

    def _spawn(self, name: str, step: int) -> None:
        if not self.engine.still_wanted(name, step):
            self.feed(name, SpawnFailed("no longer wanted"))
            return
        spec = self.engine.spec(name)
        command = spec.command if step == MAIN else spec.stop.command if step == STOPPER else spec.prepare[step]
        env = dict(self.settings.env)
        if step == MAIN and (spec.ready.probe is Probe.NOTIFY or name == DRAIN):  # a drain says what it waits for
            env["NOTIFY_SOCKET"] = self._notify_path()
            if self.notify is not None:
                self.notify.expect(spec.user)
            if spec.watchdog:
                env["WATCHDOG_USEC"] = str(int(spec.watchdog * 1e6))
        if step == STOPPER:
            env["MAINPID"] = str(self.engine.states[name].pid)
        out, err = self.logs.streams(name, spec.log.value)
        try:
            pid = procs.spawn(spec, command, env, Streams(self._null, out, err), root=step not in (MAIN, STOPPER))
        except (OSError, procs.CannotStart) as error:
            why = f"cannot fork: {error.strerror}" if isinstance(error, OSError) else str(error)
            self.say(f"{name}: {why}")
            if step == STOPPER:  # then by signal
                self.kill(self.engine.states[name].pid, spec.stop.signal)
            else:
                self.feed(name, SpawnFailed(why))
            return
        self.owners.add(pid, name)
        if step == MAIN:
            self._sessions[name] = pid
        self.feed(name, Spawned(pid, step))

    def run_helper(self, name: str, command: tuple[str, ...], output: int | None, ended: Callable[[str], None]) -> int:
        """A short command on a service's behalf (a probe, a reload); `ended` hears "exited 0" or how else it went."""
        spec = self.engine.spec(name)
        out, err = self.logs.streams(name, spec.log.value)
        streams = Streams(self._null, out if output is None else output, err if output is None else output)
        env = dict(self.settings.env) | {"MAINPID": str(self.engine.states[name].pid)}
        pid = procs.spawn(spec, command, env, streams, root=True)
        self._waits[pid] = ended
        return pid

    def run_own(self, function: Callable[[], None], output: int) -> int:
        pid = procs.fork_own(function, Streams(self._null, output, 2), "probe")
        self._waits[pid] = lambda _: None
        return pid

    def kill(self, pid: int, name: str) -> None:
        """Signal one process, never a group. A pid that is still ours to reap cannot have been given to another."""
        number = getattr(signal, f"SIG{name}")
        try:
            if pid in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[pid], number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            return

    def kill_helper(self, pid: int) -> None:
        if pid in self._waits:  # not reaped yet, so still this process
            self.kill(pid, "KILL")

    def reap(self) -> None:
        """Everything that ended, ours or not. What it said before it ended comes first."""
        if self.notify is not None:
            self.notify.drain()
        ended: list[tuple[int, int]] = []
        waitpid, mine, waits, count = os.waitpid, self.owners.pids, self._waits, 0
        self.childless = False
        try:
            while True:
                pid, status = waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                count += 1
                if pid in mine or pid in waits:
                    ended.append((pid, status))
        except ChildProcessError:
            self.childless = True
        self.reaped += count
        for pid, status in ended:
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 0 if killer else os.WEXITSTATUS(status)
        wait = self._waits.pop(pid, None)
        if wait is not None:
            wait(Exited(pid, code, killer).text())
            return
        name = self.owners.pids[pid]
        self.owners.remove(pid)
        self._forget_pidfd(pid)
        state = self.engine.states.get(name)
        main = state is not None and state.pid == pid
        session = self._sessions.get(name, 0)
        heirs = self.owners.heirs(session) if main and code == 0 and not killer and session else ()
        self.feed(name, Exited(pid, code, killer, self.logs.finish(name), heirs))

    def _spec(self, name: str) -> Service | None:
        return self.engine.known(name)

    def _told(self, name: str, told: Told) -> None:
        state = self.engine.states.get(name)
        if state is None:  # a new plan removed it, and a process of it lives on
            return
        if told.main_pid and told.main_pid != state.pid:
            self._follow(name, told.main_pid)
        self.feed(name, told)

    def _follow(self, name: str, pid: int) -> None:
        """A main process that is not our child yet: its end must be noticed even while another could reap it."""
        self.owners.pids[pid] = name
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        self._pidfds[pid] = fd
        self.poller.add(fd, IN, lambda _: self._foreign_end(pid))

    def _foreign_end(self, pid: int) -> None:
        self.reap()
        if pid in self._pidfds:  # not ours to reap: its parent lives
            name = self.owners.pids[pid]
            self.owners.remove(pid)
            self._forget_pidfd(pid)
            self.feed(name, Exited(pid, -1, 0, self.logs.finish(name)))

    def _forget_pidfd(self, pid: int) -> None:
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            self.poller.remove(fd)
            os.close(fd)

    def _forget_removed(self) -> None:
        for name in [name for name in self.logs_to_forget if name not in self.engine.states]:
            self.logs_to_forget.discard(name)
            self.logs.forget(name)

    # The outside.

    def _log_trouble(self, text: str) -> None:
        self.engine.set_condition(Condition("log output", text, blocking=False, expires=None))

    def _signals(self) -> None:
        self._wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in procs.OURS:
            signal.signal(number, _nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.poller.add(self._wake, IN, self._signalled)

    def _signalled(self, _: int) -> None:
        numbers = os.read(self._wake, 4096)
        # A full pipe loses bytes, never the need to look: reaping is asked for by any wake-up.
        self.reap()
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self.perform(self.engine.terminate(self.poller.now()))

    def _syslog(self) -> None:
        if not self.settings.syslog:
            return
        from init.syslog import Syslog

        try:
            Syslog(self.settings.syslog, self.poller, self.owners, self.logs)
        except OSError as error:
            self.say(f"no {self.settings.syslog}: {error.strerror}; syslog lines are lost")


def luck() -> float:
    """In [0, 1). `random` would cost 5 ms of boot for the one thing we need of it."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


def _nothing(number: int, frame: object) -> None:
    """Signals are read from the wake-up pipe; a handler only keeps the default from happening."""
