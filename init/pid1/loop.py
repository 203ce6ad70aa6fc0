"""PID 1's loop: one thread, one wait. Turns what happens into events and performs the engine's decisions.

At its end it ends processes of no service (`sweep`). After a bug of PID 1 `stop_in_order` stops all services in order:
little code, so that no job loses its data.
"""

from __future__ import annotations

import gc
import os
import time

from init.engine.states import Cause, Kill, Phase, PodPhase, Spawn, StartProbe, StopProbe
from init.errors import ORDINARY, ConfigError, describe_error
from init.lean import signal
from init.pid1 import modules
from init.pid1.children import Children
from init.pid1.core import AGAIN, Core
from init.pid1.spawn import procs
from init.pid1.spawn.owners import parent, processes
from init.pid1.wait import IN
from init.plan import service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Action
    from init.pid1.core import Settings
    from init.pid1.probes import RunningProbes
    from init.pid1.serve.requests import Requests
    from init.plan.compile import Plan

EX_CONFIG = 78  # docs/reference/exit-codes.md
OPEN_PROBES = (
    "the kernel refuses the filter that keeps jobs away from it ({}): init hangs up on them instead, and a flood can "
    "delay the kubelet; let the pod's seccomp profile allow setsockopt"
)
MOMENT = 0.8  # seconds that the rest gets after a signal
LAST_WORDS = 2.0  # seconds for a slow log reader at the end


class Woken(Exception):
    """Raised by a signal handler to end a wait that nothing else can end."""


class Init:
    """All parts of PID 1, and the events that wake them."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.core = Core(plan, settings, self._act)
        self._children = Children(self.core)
        self._probes: RunningProbes | None = None
        self._requests: Requests | None = None
        self._turns = 0
        self._after_turn: list[Callable[[], None]] = []
        self._arrived: list[int] = []  # signals
        self._missed = False  # a signal has no byte in the pipe
        self._signals()

    # Life.

    def run(self) -> int:
        """Start everything; return the exit code when everything has stopped."""
        core, engine = self.core, self.core.engine
        modules.look_again()
        core.perform(engine.begin(core.settings.began))
        self._open()
        gc.freeze()  # existing objects are permanent; collecting them in a child would only copy their pages
        gc.enable()
        while engine.phase is not PodPhase.STOPPED:
            self._turn(engine.next_wake())
            now = core.poller.now()
            wake = engine.next_wake()
            if wake is not None and wake <= now:
                core.perform(engine.tick(now))
            for call in self._after_turn:
                core.attempt(call)
        core.attempt(self._sweep)
        if engine.ending.why:
            core.log(f"ended: {engine.ending.why}")
        core.logs.close(LAST_WORDS)
        return engine.ending.exit_code

    def _act(self, name: str, action: Action) -> None:
        match action:
            case Spawn():
                self._children.start(name, action.step)
            case Kill():
                self._children.kill(action.pid, action.signal)
            case StartProbe():
                self._watch(name)
            case StopProbe() if self._probes is not None:
                self._probes.end(name)

    def _watch(self, name: str) -> None:
        """Watch a service's readiness; load the probes' module with the first one."""
        if self._probes is None:
            try:
                from init.pid1.probes import RunningProbes
            except ORDINARY as error:
                self.core.report_trouble(f"a probe of {name}: {describe_error(error)}")
                self.core.poller.after(AGAIN, lambda: self._watch_again(name))
                return
            self._probes = RunningProbes(self.core, self._children)
        self._probes.begin(name)

    def _watch_again(self, name: str) -> None:
        state = self.core.engine.states.get(name)
        if state is not None and state.phase is Phase.STARTING:
            self._watch(name)

    def _turn(self, until: float | None) -> None:
        try:
            self.core.poller.wait(until)
        except Woken:
            self._missed = True  # the poller reports readable descriptors again
        if self._missed:
            self._missed = False
            self._handle_signals()
        self._turns += 1

    def _sweep(self) -> None:

        sweep(self.core, self._children, self._turn)

    # Sockets.

    def _open(self) -> None:
        """Open what the first services need not wait for: the control socket, syslog, the kubelet's probes."""
        settings, until_done, sockets = self.core.settings, self.core.until_done, self._children.sockets
        until_done("notifications", sockets.open_notify)
        if settings.syslog:
            until_done(settings.syslog, sockets.open_syslog)
        if settings.probes:
            outside = settings.probes_from == "outside"
            until_done("probes", lambda: self._serve(settings.probes, "MINIVM_PROBES", outside=outside))
        if settings.http:
            until_done("HTTP", lambda: self._serve(settings.http, "MINIVM_HTTP"))
        until_done("control socket", self._control)

    def _serve(self, address: str, field: str, *, outside: bool = False) -> None:
        from init.pid1.serve.server import StatusServer, listen, pages

        core = self.core
        try:
            listener, refused = listen(address, field, outside=outside)
            StatusServer(core.poller, listener, pages(core, self._counters), outside=bool(refused))
            if refused:
                core.condition("probe port", OPEN_PROBES.format(refused))
                core.log(f"probe port: {OPEN_PROBES.format(refused)}")
        except ConfigError as error:
            core.log(str(error))
            core.perform(core.engine.end(core.poller.now(), EX_CONFIG, Cause(str(error)), drain=False))

    def _control(self) -> None:
        from init.pid1.serve.control import Control
        from init.pid1.serve.requests import Requests

        if self._requests is None:
            self._requests = Requests(self.core, self._children)
            self._after_turn.append(self._requests.after_turn)
        Control(f"{self.core.settings.run}/control.sock", self.core.poller, self._requests.handle)

    def _counters(self) -> dict[str, int]:
        """Return PID 1's own counters for /metrics (`init.view.metrics`)."""
        logs, syslog = self.core.logs, self._children.sockets.syslog
        return {
            "log_bytes": logs.written,
            "log_lost_bytes": logs.lost_ever,
            "impossible_events": self.core.engine.impossible,
            "reaped": self._children.reaped,
            "wakeups": self._turns,
            "syslog_dropped_lines": syslog.meter.refused if syslog else 0,
        }

    # Signals.

    def _signals(self) -> None:
        self._wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def record_signal(number: int, _: object) -> None:
            """Record the signal. The byte that Python writes in C only ends a wait; if it could not, this one does."""
            self._arrived.append(number)
            try:
                os.write(write, b"\0")
            except OSError:
                self._missed = True
                if self.core.poller.waiting:
                    raise Woken from None

        for number in procs.OURS:
            signal.signal(number, record_signal)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.core.poller.add(self._wake, IN, self._woken)

    def _woken(self, _: int) -> None:
        os.read(self._wake, 4096)
        self._handle_signals()

    def _handle_signals(self) -> None:
        arrived, self._arrived = self._arrived, []
        # A full pipe loses bytes, but every wake-up reaps.
        self._reap()
        if signal.SIGTERM in arrived or signal.SIGINT in arrived:
            self.core.perform(self.core.engine.end(self.core.poller.now()))

    def _reap(self) -> None:
        """Reap, and retry until it succeeds: the signal does not come again."""
        try:
            self._children.reap()
        except ORDINARY as error:
            self.core.report_trouble(f"reap: {describe_error(error)}")
            self.core.poller.after(AGAIN, self._reap)


def bug(error: Exception) -> str:
    """Format the error with its traceback, if available."""
    try:
        import traceback

        return "".join(traceback.format_exception(error))
    except Exception:
        return f"{type(error).__name__}: {error}\n"


def stop_in_order(core: Core) -> None:
    """Stop wave by wave: signal, wait for the longest grace period, kill. The kernel waits, for SIGCHLD."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    specs, states = core.engine.specs, core.engine.states
    deadline = time.monotonic() + core.settings.grace * 0.9
    for wave in service.waves(service.stop_edges(specs.values())):
        pids = {states[name].pid: name for name in wave if name in states and states[name].pid}
        for pid, name in pids.items():
            _signal(pid, specs[name].stop.signal)
        until = min(deadline, time.monotonic() + max((specs[name].stop.grace for name in wave), default=0.0))
        _wait(core, pids, until)
        for pid in pids:
            _signal(pid, "KILL")
        _wait(core, pids, time.monotonic() + 1.0)


def _signal(pid: int, name: str) -> None:
    try:
        os.kill(pid, getattr(signal, f"SIG{name}"))
    except OSError:
        return


def _wait(core: Core, pids: dict[int, str], until: float) -> None:
    """Wait until all have ended; drain the log meanwhile, since a service may block on its last lines."""
    while pids:
        try:
            while pids:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                pids.pop(pid, None)
        except ChildProcessError:
            return
        try:
            for name in core.logs.rings:
                core.logs.finish(name)
        except Exception:
            os.write(2, b"minivm: the log does not work either\n")
        remaining = until - time.monotonic()
        if not pids or remaining <= 0:
            return
        signal.sigtimedwait([signal.SIGCHLD], min(remaining, 0.1))


def sweep(core: Core, children: Children, turn: Callable[[float | None], None]) -> None:
    """Signal the rest. Before every service has stopped, only main processes are signalled."""
    for name in ("TERM", "KILL"):
        children.reap()
        if children.childless:
            return
        _signal_all(core, children, name)
        until = core.poller.now() + MOMENT
        while not children.childless and core.poller.now() < until:
            turn(until)
            children.reap()


def _signal_all(core: Core, children: Children, name: str) -> None:
    if procs.is_pid_1():
        try:
            os.kill(-1, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return
        except OSError as error:
            core.report_trouble(f"cannot send {name} to what is left: {describe_error(error)}")
        return
    own_pid = os.getpid()
    for pid in processes():
        above, steps = pid, 0
        while above > 1 and above != own_pid and steps < 64:
            above, steps = parent(above), steps + 1
        if above == own_pid and pid != own_pid:
            children.kill(pid, name)
