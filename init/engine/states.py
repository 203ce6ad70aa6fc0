"""Vocabulary of the engine: a service's state, the events that change it, and the actions for PID 1 to perform."""

from __future__ import annotations

from init.lean import Choice, record, signal
from init.plan.service import Kind

TYPE_CHECKING = False

MAIN = -1  # step of the command itself; prepare commands are 0, 1, ...
STOPPER = -2  # step of the stop command
HANDOVER_WAIT = 2.0  # how long the heirs of an ended main process may take to report the new main process

LOST_WAIT = 1.0  # between two attempts to kill a service whose lease is lost


class Phase(Choice):
    """Phase of one service."""

    WAITING = "waiting"
    PREPARING = "preparing"
    STARTING = "starting"
    READY = "ready"
    HANDOVER = "handover"  # the main process exited 0 and left child processes behind
    STOPPING = "stopping"
    STOPPED = "stopped"
    BACKOFF = "backoff"
    FAILED = "failed"
    DONE = "done"


OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


class PodPhase(Choice):
    """Phase of the whole pod."""

    BOOT = "boot"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


class AfterStop(Choice):
    """Next step after the end of a process that was stopped."""

    STOP = "stop"
    RESTART = "again"
    FAIL = "fail"


@record(frozen=True, slots=True)
class Cause:
    """Reason for a failure. `init.view.reasons` decides which reader sees which part."""

    outcome: str  # init's own words, like the other fields except `quoted`
    quoted: str = ""  # output of a service or its probe: it can contain anything
    speaker: tuple[str, ...] = ()  # the command that is quoted
    detail: str = ""
    verdict: str = ""  # the decision taken, such as giving up

    def __str__(self) -> str:
        return self.text(f": {self.quoted}" if self.quoted else "")

    def text(self, quote: str) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.outcome}{detail}{quote}" + (f"; {self.verdict}" if self.verdict else "")


@record(frozen=True, slots=True)
class State:
    """Everything that the engine remembers of one service. Times are those of the monotonic clock."""

    phase: Phase = Phase.WAITING
    pid: int = 0  # the main process, or the running prepare command
    step: int = MAIN
    spawning: bool = False  # requested, and not yet reported
    stop_pid: int = 0  # the stop command
    former_pids: tuple[int, ...] = ()  # previous main processes that may still exit
    since: float = 0.0  # the start of this phase
    started_at: float = 0.0
    ready_at: float | None = None
    deadline: float | None = None  # what is overdue then depends on the phase
    after_stop: AfterStop | None = None  # once a stop is requested
    starts: int = 0
    recent_failures: tuple[float, ...] = ()  # times, within the window of the restart rule
    failure_count: int = 0  # since boot
    failures_in_row: int = 0  # since the service last was ready for longer than the window
    last_failure: Cause | None = None
    probe_status: Cause | None = None  # why the probe has not passed yet
    status: str = ""
    late: bool = False  # not ready in time, and not stopped for that: services after it need not wait
    standby: bool = False  # another pod has the lease: this service waits, which is no failure
    reloading: bool = False
    last_end: str = ""  # how its last process ended, prepare commands included
    last_exit: str = ""  # how the main process, or a failed prepare command, last ended
    last_line: str = ""  # the last line of that process


# Events.


@record(frozen=True, slots=True)
class NeedsMet:
    """Everything that the service waits for is ready."""


@record(frozen=True, slots=True)
class Spawned:
    pid: int
    step: int


@record(frozen=True, slots=True)
class SpawnFailed:
    why: str
    quoted: str = ""
    scarce: bool = False  # a resource of the machine is missing: not the service's own failure


@record(frozen=True, slots=True)
class Exited:
    pid: int
    code: int
    signal: int = 0
    last_line: str = ""
    heirs: tuple[int, ...] = ()  # child processes that it left behind

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
class ProbePassed:
    """The probe passed."""


@record(frozen=True, slots=True)
class ProbeFailed:
    """The probe did not pass: the reason in init's own words, except `quoted`."""

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
    standby: bool = False


@record(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@record(frozen=True, slots=True)
class StopRequested:
    """Stop the service."""

    after_stop: AfterStop
    grace: float


@record(frozen=True, slots=True)
class BindingLost:
    """A service that this one is bound to is no longer ready: end its process at once."""


@record(frozen=True, slots=True)
class ShortenGrace:
    """Shorten the grace period of a service that is stopping."""

    grace: float


@record(frozen=True, slots=True)
class StartRequested:
    """Start the service, whatever happened before."""


# Actions.


@record(frozen=True, slots=True)
class Spawn:
    step: int


@record(frozen=True, slots=True)
class Kill:
    pid: int
    signal: str


@record(frozen=True, slots=True)
class StartProbe:
    """Begin the readiness probe."""


@record(frozen=True, slots=True)
class StopProbe:
    """Stop the readiness probe."""


@record(frozen=True, slots=True)
class EndPod:
    why: Cause


@record(frozen=True, slots=True)
class ImpossibleEvent:
    """Report an event that this phase cannot have, a bug of minivm. It is counted and logged; nothing else happens."""

    what: str


if TYPE_CHECKING:
    from init.plan.service import Service

    Event = (
        NeedsMet
        | Spawned
        | SpawnFailed
        | Exited
        | ProbePassed
        | ProbeFailed
        | Notified
        | Tick
        | StopRequested
        | BindingLost
        | ShortenGrace
        | StartRequested
    )
    Action = Spawn | Kill | StartProbe | StopProbe | EndPod | ImpossibleEvent
    Step = tuple[State, list[Action]]


def is_satisfied(state: State) -> bool:
    """Tell if services that need this one may start."""
    return state.phase in (Phase.READY, Phase.DONE) or (state.phase is Phase.HANDOVER and state.ready_at is not None)


def is_failing(service: Service, state: State) -> bool:
    """Tell if the last run of a required periodic check failed, which makes the pod not ready."""
    return service.kind is Kind.PERIODIC and service.required and state.last_failure is not None


def is_idle(state: State) -> bool:
    """Tell if no process of the service runs or is about to run."""
    return not (state.pid or state.stop_pid or state.spawning or state.phase is Phase.HANDOVER)


def signal_name(number: int) -> str:
    """Return the name without `SIG`, without loading the enum of the `signal` module, which would delay a restart."""
    for name in dir(signal):  # alphabetical: CHLD comes before its old name CLD
        if name.startswith("SIG") and not name.startswith("SIG_") and getattr(signal, name) == number:
            return name.removeprefix("SIG")
    return str(number)
