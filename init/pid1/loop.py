"""PID 1 at work: one thread, one wait. It turns what happens into events and does what the engine decides."""

from __future__ import annotations

import gc
import os

from init.engine.engine import Condition, Engine
from init.engine.states import Cause, Kill, PodPhase, Spawn, Told, Unwatch, Watch
from init.engine.trace import Trace
from init.errors import ORDINARY, ConfigError, in_words
from init.lean import signal
from init.pid1 import modules
from init.pid1.children import Children
from init.pid1.log.logs import Logs
from init.pid1.spawn import procs
from init.pid1.wait.poller import IN, Poller, named
from init.pid1.watches import Watches
from init.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.engine.services import Todo
    from init.engine.states import Event
    from init.pid1.log.syslog import Syslog
    from init.pid1.notify import Notify
    from init.pid1.serve.requests import Requests
    from init.pid1.spawn.closer import Closer
    from init.plan.compile import Plan

EX_CONFIG = 78  # docs/reference/exit-codes.md
AGAIN = 1.0  # seconds until PID 1 asks the machine once more for a socket that it could not get
TOLD = 10.0  # seconds between two lines about one trouble
LAST_WORDS = 2.0  # seconds that a slow log reader gets at the end


@record(frozen=True, slots=True)
class Settings:
    """The pod's environment, read once."""

    run: str
    http: str
    probes: str  # the address that the kubelet asks, when it has one of its own
    probes_from: str
    grace: float
    as_json: bool
    pod: str
    syslog: str
    env: Mapping[str, str]
    began: float  # monotonic, when the process was entered
    refused: str = ""  # drop-ins that are left out


class Woken(Exception):
    """By a signal, in the middle of a wait that nothing else can end."""


class Init:
    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.settings = settings
        self.poller = Poller()
        self.poller.troubled = self.troubled
        self.turns = 0
        self._todo: Todo = []
        self._performing = False
        self.after_turn: list[Callable[[], None]] = [self._forget_removed]
        self._told_troubles: dict[str, float] = {}
        self._arrived: list[int] = []  # signals
        self._missed = False  # one of them has no byte in the pipe
        self.logs_to_forget: set[str] = set()
        self.trace = Trace()
        self.engine = Engine(plan, settings.grace, luck, self.trace)
        self.logs = Logs(self.poller, 1, as_json=settings.as_json, troubled=self._log_trouble)
        self.children = Children(self)
        self._watches = Watches(self)
        self._signals()
        self.notify: Notify | None = None
        self._requests: Requests | None = None
        self.syslog: Syslog | None = None
        self._closer: Closer | None = None

    # Life.

    def run(self) -> int:
        """Start everything, and come back with the exit code when all of it has stopped."""
        modules.look_again()
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
                self.attempt(call)
        self.attempt(self._sweep)
        if self.engine.ending.why:
            self.say(f"ended: {self.engine.ending.why}")
        self.logs.close(LAST_WORDS)
        return self.engine.ending.exit_code

    def _open(self) -> None:
        """Everything that the first services need not wait for: callers, syslog, probes of the kubelet."""
        self._until_done("notifications", self.listen_for_notifications)
        if self.settings.syslog:
            self._until_done(self.settings.syslog, self._syslog)
        if self.settings.probes:
            outside = self.settings.probes_from == "outside"
            self._until_done("probes", lambda: self._serve(self.settings.probes, "MINIVM_PROBES", outside=outside))
        if self.settings.http:
            self._until_done("HTTP", lambda: self._serve(self.settings.http, "MINIVM_HTTP"))
        self._until_done("control socket", self._control)

    def _until_done(self, what: str, opens: Callable[[], object]) -> None:
        """What PID 1 needs of the machine and cannot get now, it asks for again; meanwhile the pod's state says so."""
        try:
            opens()
        except ORDINARY as error:
            if what not in self.engine.conditions:
                self.say(f"no {what}: {in_words(error)}; tried again every {AGAIN:g} s")
            self.engine.set_condition(Condition(what, in_words(error), blocking=False, expires=None))
            self.poller.after(AGAIN, lambda: self._until_done(what, opens))
            return
        if what in self.engine.conditions:
            self.engine.set_condition(Condition(what, "", blocking=False, expires=None))
            self.say(f"{what}: works now")

    def _serve(self, address: str, field: str, *, outside: bool = False) -> None:
        from init.pid1.serve.pages import pages
        from init.pid1.serve.server import Server, listen

        try:
            Server(self.poller, listen(address, field, outside=outside), pages(self))
        except ConfigError as error:
            self.say(str(error))
            self.perform(self.engine.end(self.poller.now(), EX_CONFIG, Cause(str(error)), drain=False))

    def _control(self) -> None:
        from init.pid1.serve.control import Control
        from init.pid1.serve.requests import Requests

        if self._requests is None:
            self._requests = Requests(self)
        Control(f"{self.settings.run}/control.sock", self.poller, self._requests.handle)

    def listen_for_notifications(self) -> Notify:
        """$NOTIFY_SOCKET: opened when the first service that notifies starts, or soon after the first that does not."""
        from init.pid1.notify import Notify

        if self.notify is None:
            path = f"{self.settings.run}/notify.sock"
            self.notify = Notify(
                path, self.poller, self.children.owners, self.engine.known, self._told, self.say, self._closes
            )
        return self.notify

    def refuse(self, text: str) -> None:
        """Drop-ins that are wrong: told until `configwatch` has taken good ones."""
        self.say(f"drop-ins: refused: {text}")
        self.engine.set_condition(Condition("drop-ins", f"refused: {text}", blocking=False, expires=None))

    def _closes(self) -> Closer:
        """Who closes what strangers attach to their messages: loaded for the first that does."""
        from init.pid1.spawn.closer import Closer

        if self._closer is None:
            self._closer = Closer(self.poller, self.say)
            if self.notify is not None:
                self._closer.when_late = self.notify.readable
        return self._closer

    def turn(self, until: float | None) -> None:
        try:
            self.poller.wait(until)
        except Woken:
            self._missed = True  # what there is to be read is told of again
        if self._missed:
            self._missed = False
            self._signalled()
        self.turns += 1

    def troubled(self, text: str) -> None:
        """Something that PID 1 could not do and will do again. Each trouble is told once in a while, not each time."""
        now = self.poller.now()
        if now - self._told_troubles.get(text, -TOLD) >= TOLD:
            if len(self._told_troubles) > 64:
                self._told_troubles.clear()
            self._told_troubles[text] = now
            self.say(f"trouble: {text}; tried again")

    def attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ORDINARY as error:
            self.troubled(f"{named(call)}: {in_words(error)}")

    def _sweep(self) -> None:
        from init.pid1.sweep import sweep

        sweep(self)

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
                        self.children.start(name, action.step)
                    case Kill():
                        self.children.kill(action.pid, action.signal)
                    case Watch():
                        self._watches.begin(name)
                    case Unwatch():
                        self._watches.end(name)
        finally:
            self._performing = False
        if self.trace.news:
            news, self.trace.news = self.trace.news, []
            for text, aloud in news:
                self.logs.say(text, aloud=aloud)
            self.logs.flush()

    def _told(self, name: str, told: Told) -> None:
        state = self.engine.states.get(name)
        if state is None:  # a new plan removed it, and a process of it lives on
            return
        if told.main_pid and told.main_pid != state.pid:
            self.children.follow(name, told.main_pid)
        self.feed(name, told)

    def _forget_removed(self) -> None:
        for name in [name for name in self.logs_to_forget if name not in self.engine.states]:
            self.logs_to_forget.discard(name)
            self.logs.forget(name)

    # The outside.

    def _log_trouble(self, text: str) -> None:
        self.engine.set_condition(Condition("log output", text, blocking=False, expires=None))

    def _signals(self) -> None:
        self._wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def arrived(number: int, _: object) -> None:
            """The byte that Python wrote in C only ends a wait; where it could not be written, this one does."""
            self._arrived.append(number)
            try:
                os.write(write, b"\0")
            except OSError:
                self._missed = True
                if self.poller.waiting:
                    raise Woken from None

        for number in procs.OURS:
            signal.signal(number, arrived)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.poller.add(self._wake, IN, self._woken)

    def _woken(self, _: int) -> None:
        os.read(self._wake, 4096)
        self._signalled()

    def _signalled(self) -> None:
        arrived, self._arrived = self._arrived, []
        # A full pipe loses bytes, never the need to look: reaping is asked for by any wake-up.
        self._reap()
        if signal.SIGTERM in arrived or signal.SIGINT in arrived:
            self.perform(self.engine.end(self.poller.now()))

    def _reap(self) -> None:
        """The signal has come and does not come again: until this is done it is made again."""
        try:
            self.children.reap()
        except ORDINARY as error:
            self.troubled(f"reap: {in_words(error)}")
            self.poller.after(AGAIN, self._reap)

    def _syslog(self) -> None:
        from init.pid1.log.syslog import Syslog

        self.syslog = Syslog(self.settings.syslog, self.poller, self.children.owners, self.logs, self._closes)


def luck() -> float:
    """In [0, 1). `random` would cost 5 ms of boot for the one thing we need of it."""
    try:
        return int.from_bytes(os.urandom(4), "little") / 2**32
    except OSError:
        return Poller.now() % 1.0  # spread enough, for a delay
