"""A bounded record of every change, on the monotonic clock, and its log lines. Pure."""

from __future__ import annotations

from init.engine.states import Phase
from init.lean import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.states import State

KEPT = 4096


@record(frozen=True, slots=True)
class Happening:
    at: float  # monotonic
    service: str  # empty: the pod
    event: str
    detail: str


class Trace:
    """The newest happenings; old ones are dropped, except those of the boot."""

    def __init__(self, kept: int = KEPT) -> None:
        self._boot: list[Happening] = []
        self._later: list[Happening] = []
        self._kept = kept
        self._boot_room = kept // 4
        # The loop logs and empties this list of (text, whether it also goes to the pod's log).
        self.news: list[tuple[str, bool]] = []

    def add(self, now: float, service: str, event: str, detail: str = "") -> None:
        item = Happening(now, service, event, detail)
        if len(self._boot) < self._boot_room:
            self._boot.append(item)
        else:
            self._later.append(item)
            del self._later[: -self._kept]
        if not service and event != "stopped":
            self.news.append((f"{event}: {detail}", False))

    def change(self, now: float, name: str, before: State, after: State) -> None:
        """Record the differences between two states of a service."""
        if after.pid and after.pid != before.pid:
            handed_over = before.pid and before.pid in after.former_pids
            detail = f"pid {after.pid}" + (f", taking over from {before.pid}" if handed_over else "")
            self.add(now, name, "main-pid" if handed_over else "spawned", detail)
        if before.pid and not after.pid and after.last_end:
            line = f": {after.last_line}" if after.last_line and after.last_end != "exited 0" else ""
            self.add(now, name, "exited", f"{after.last_end}{line}")
        if after.reloading is not before.reloading:
            self.add(now, name, "reloading" if after.reloading else "reloaded")
        if after.phase is not before.phase:
            failed = after.phase in (Phase.BACKOFF, Phase.FAILED, Phase.WAITING)
            self.add(
                now,
                name,
                after.phase.value,
                str(after.last_failure) if failed and after.last_failure is not None else "",
            )
        if text := _news(now, before, after):
            self.news.append((f"{name}: {text}", True))

    def impossible(self, now: float, name: str, what: str) -> None:
        self.add(now, name, "impossible", what)
        self.news.append((f"{name}: a bug of init itself: {what}", True))

    def happenings(self) -> list[Happening]:
        return [*self._boot, *self._later]


def _news(now: float, before: State, after: State) -> str:
    """Return the log line for a failure or its end: a service that dies logs nothing itself."""
    last, failure = before.last_failure, after.last_failure
    if after.failure_count > before.failure_count:
        if after.phase is Phase.WAITING:
            return f"{failure}; starts again"
        if after.phase is Phase.BACKOFF:
            next_start = (after.deadline or now) - now
            return f"{failure}; failed {times(after.failure_count)}, next start in {next_start:.1f} s"
        if after.phase is Phase.READY:  # a periodic service: a repeated failure is reported once
            is_repeated = last is not None and failure is not None and last.outcome == failure.outcome
            return "" if is_repeated else f"last run {failure}"
        return str(failure)
    if last is not None and failure is None and after.phase in (Phase.READY, Phase.DONE):
        return "works again" if before.phase is Phase.READY else f"{after.phase.value} again"
    return ""


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
