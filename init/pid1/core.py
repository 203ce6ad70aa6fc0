"""Shared parts of PID 1: the engine, the one wait, the log, and the path from event to action.

The loop (`init.pid1.loop`) creates it and passes it to each part.
"""

from __future__ import annotations

import os

from init.engine.engine import Condition, Engine
from init.engine.machine import Trace
from init.engine.order import read_wished_drain_time
from init.errors import ORDINARY, describe_error
from init.lean import record
from init.pid1.logs import Logs
from init.pid1.wait import Poller, name_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.engine.machine import Todo
    from init.engine.states import Action, Event
    from init.plan.compile import Plan

AGAIN = 1.0  # seconds until a refused request to the machine is repeated
REPEAT = 10.0  # seconds between two log lines about one trouble
MOST_TROUBLES = 64  # remembered at once


@record(frozen=True, slots=True)
class Settings:
    """The settings from the pod's environment, read once (`init.pid1.start`)."""

    run: str
    http: str
    probes: str  # a separate address for the kubelet's probes, or ""
    probes_from: str
    grace: float
    as_json: bool
    pod: str
    syslog: str
    env: Mapping[str, str]
    began: float  # monotonic time of the process's start
    refused: str = ""  # drop-ins that are ignored


class Core:
    def __init__(self, plan: Plan, settings: Settings, act: Callable[[str, Action], None]) -> None:
        self.settings = settings
        self.poller = Poller()
        self.poller.report_trouble = self.report_trouble
        self.engine = Engine(plan, settings.grace, jitter, Trace(), read_wished_drain_time(settings.env))
        self.logs = Logs(self.poller, 1, as_json=settings.as_json, troubled=self._log_trouble)
        self._act = act
        self._todo: Todo = []
        self._performing = False
        self._troubles: dict[str, float] = {}  # when each was last logged

    def handle(self, name: str, event: Event) -> None:
        self.perform(self.engine.handle(name, event, self.poller.now()))

    def perform(self, todo: Todo) -> None:
        """Perform actions in order. An event of an action may add more actions, which come after it."""
        self._todo += todo
        if self._performing:
            return
        self._performing = True
        try:
            while self._todo:
                self._act(*self._todo.pop(0))
        finally:
            self._performing = False
        trace = self.engine.trace
        if trace.news:
            news, trace.news = trace.news, []
            for text, aloud in news:
                self.logs.log(text, aloud=aloud)
            self.logs.flush()

    def log(self, text: str) -> None:
        self.logs.log(text)
        self.logs.flush()

    def report_trouble(self, text: str) -> None:
        """Log a failure that PID 1 will retry; each trouble at most once per period."""
        now = self.poller.now()
        if now - self._troubles.get(text, -REPEAT) >= REPEAT:
            if len(self._troubles) > MOST_TROUBLES:
                self._troubles.clear()
            self._troubles[text] = now
            self.log(f"trouble: {text}; tried again")

    def attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ORDINARY as error:
            self.report_trouble(f"{name_call(call)}: {describe_error(error)}")

    def until_done(self, what: str, opens: Callable[[], object]) -> None:
        """Retry what PID 1 needs and the machine refuses; a condition of the pod reports it meanwhile."""
        try:
            opens()
        except ORDINARY as error:
            if what not in self.engine.conditions:
                self.log(f"no {what}: {describe_error(error)}; tried again every {AGAIN:g} s")
            self.condition(what, describe_error(error))
            self.poller.after(AGAIN, lambda: self.until_done(what, opens))
            return
        if what in self.engine.conditions:
            self.condition(what, "")
            self.log(f"{what}: works now")

    def condition(self, name: str, text: str) -> None:
        """Set one of PID 1's own conditions, which block nothing; an empty text removes it."""
        self.engine.set_condition(Condition(name, text, blocking=False, expires=None))

    def _log_trouble(self, text: str) -> None:
        self.condition("log output", text)


def jitter() -> float:
    """Return a number in [0, 1). Loading `random` would cost 5 ms of boot."""
    try:
        return int.from_bytes(os.urandom(4), "little") / 2**32
    except OSError:
        return Poller.now() % 1.0  # random enough for a delay
