"""A service's state at run time, what can happen to it, and what the decisions ask for."""

from __future__ import annotations

from init.choices import Choice
from init.lean import signal
from init.plan.service import Kind
from init.records import record

TYPE_CHECKING = False

MAIN = -1  # the step of the command itself; prepare commands are 0, 1, ...
STOPPER = -2  # the step of the stop command
HANDOVER_WAIT = 2.0  # how long a process that left heirs may take to say which of them is the main one


class Phase(Choice):
    WAITING = "waiting"
    PREPARING = "preparing"
    STARTING = "starting"
    READY = "ready"
    HANDOVER = "handover"  # the main process exited 0 and left others of its own behind
    STOPPING = "stopping"
    STOPPED = "stopped"
    BACKOFF = "backoff"
    FAILED = "failed"
    DONE = "done"


OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


class PodPhase(Choice):
    BOOT = "boot"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Then(Choice):
    """What follows the end of a process that was told to stop."""

    STOP = "stop"
    AGAIN = "again"
    FAIL = "fail"


@record(frozen=True, slots=True)
class Cause:
    """Why something went wrong. Who may read which part is decided where it is shown: `init.view.quotes`."""

    outcome: str  # in init's own words, as is what follows, but for what is quoted
    quoted: str = ""  # what a service, or its probe, said: it can hold anything
    speaker: tuple[str, ...] = ()  # the command that is quoted
    detail: str = ""
    verdict: str = ""  # what was decided: it gave up, say

    def __str__(self) -> str:
        return self.text(f": {self.quoted}" if self.quoted else "")

    def text(self, quote: str) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.outcome}{detail}{quote}" + (f"; {self.verdict}" if self.verdict else "")


@record(frozen=True, slots=True)
class State:
    phase: Phase = Phase.WAITING
    pid: int = 0  # the main process, or the prepare command that runs
    step: int = MAIN
    spawning: bool = False  # asked for, and not yet reported
    helper: int = 0  # the stop command
    former: tuple[int, ...] = ()  # main processes that handed over and may still exit
    since: float = 0.0
    started_at: float = 0.0
    ready_at: float | None = None
    deadline: float | None = None
    then: Then | None = None
    starts: int = 0
    failures: tuple[float, ...] = ()  # within the window
    failed: int = 0  # since boot
    streak: int = 0
    why: Cause | None = None  # of the last failure
    said: Cause | None = None  # by the probe
    status: str = ""
    reloading: bool = False
    ended: str = ""  # how its last process ended, preparation too
    last_exit: str = ""  # how it last ended itself, or what kept it from starting did
    last_line: str = ""  # what that one said last


# Events.


@record(frozen=True, slots=True)
class Go:
    """What it waited for is there."""


@record(frozen=True, slots=True)
class Spawned:
    pid: int
    step: int


@record(frozen=True, slots=True)
class SpawnFailed:
    why: str
    quoted: str = ""
    scarce: bool = False  # for want of something that the machine lacks: no failure of the service's own


@record(frozen=True, slots=True)
class Exited:
    pid: int
    code: int
    signal: int = 0
    last_line: str = ""
    heirs: tuple[int, ...] = ()  # processes of its own that it left behind

    @property
    def well(self) -> bool:
        return self.code == 0 and self.signal == 0

    def text(self) -> str:
        if self.signal:
            return f"killed by {signal_name(self.signal)}"
        if self.code < 0:
            return "ended, and its parent took its status"
        return f"exited {self.code}"


@record(frozen=True, slots=True)
class Passed:
    """The probe passed."""


@record(frozen=True, slots=True)
class Said:
    """The probe did not pass, and this is why: in init's own words, but for what is quoted."""

    text: str
    detail: str = ""
    quoted: str = ""


@record(frozen=True, slots=True)
class Notified:
    """A notification from one of the service's own processes."""

    ready: bool = False
    main_pid: int = 0
    status: str | None = None
    reloading: bool = False
    watchdog: bool = False


@record(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@record(frozen=True, slots=True)
class Down:
    then: Then
    grace: float


@record(frozen=True, slots=True)
class Hurry:
    grace: float


@record(frozen=True, slots=True)
class Up:
    """Asked to run, whatever happened before."""


# Actions.


@record(frozen=True, slots=True)
class Spawn:
    step: int


@record(frozen=True, slots=True)
class Kill:
    pid: int
    signal: str


@record(frozen=True, slots=True)
class Watch:
    """Begin the readiness probe."""


@record(frozen=True, slots=True)
class Unwatch:
    pass


@record(frozen=True, slots=True)
class EndPod:
    why: Cause


@record(frozen=True, slots=True)
class Impossible:
    """Nothing is done: an event came that this phase cannot have, by a bug of ours. It is counted, and told."""

    what: str


if TYPE_CHECKING:
    from init.plan.service import Service

    Event = Go | Spawned | SpawnFailed | Exited | Passed | Said | Notified | Tick | Down | Hurry | Up
    Action = Spawn | Kill | Watch | Unwatch | EndPod | Impossible
    Step = tuple[State, list[Action]]


def satisfied(state: State) -> bool:
    """Whether others may count on it."""
    return state.phase in (Phase.READY, Phase.DONE) or (state.phase is Phase.HANDOVER and state.ready_at is not None)


def is_failing(service: Service, state: State) -> bool:
    """Whether the pod is not ready because the last run of this check failed: a periodic service that is required."""
    return service.kind is Kind.PERIODIC and service.required and state.why is not None


def idle(state: State) -> bool:
    """Nothing of it runs, and nothing will start by itself while it is not wanted."""
    return not (state.pid or state.helper or state.spawning or state.phase is Phase.HANDOVER)


def signal_name(number: int) -> str:
    """Without `SIG`; a restart waits for it, and need not wait for the enum of the `signal` module."""
    for name in dir(signal):  # in alphabetical order: CHLD comes before its old name CLD
        if name.startswith("SIG") and not name.startswith("SIG_") and getattr(signal, name) == number:
            return name.removeprefix("SIG")
    return str(number)
