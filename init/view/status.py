"""The pod's status: the snapshot that PID 1 answers to `status`, and its text for `minivm status` and `minivm why`.

PID 1 fills a `Snapshot`; the control socket carries it as a mapping; the command line shows it.
"""

from __future__ import annotations

from init.lean import fields, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


@record(frozen=True, slots=True)
class ServiceView:
    name: str
    about: str
    kind: str
    state: str  # waiting preparing starting ready reloading stopping stopped backoff failed done
    ready: bool
    required: bool
    pid: int  # 0: none
    since: float  # seconds in this state
    uptime: float  # seconds since the main process started; 0 without one
    starts: int
    failures: int  # all failures since boot
    status: str  # the service's own STATUS=
    reasons: tuple[str, ...]  # why it is not ready, each a leaf cause
    last_exit: str  # "exited 3", "killed by KILL", "" when it never ended
    last_line: str  # the last line it wrote before its last end
    next_start_in: float | None
    needs: tuple[str, ...]
    after: tuple[str, ...]


@record(frozen=True, slots=True)
class ConditionView:
    name: str
    text: str
    blocking: bool
    expires_in: float | None


@record(frozen=True, slots=True)
class Snapshot:
    role: str
    pod: str
    phase: str  # boot running draining stopping
    ready: bool
    started: bool  # true once it has been ready
    uptime: float
    boot_seconds: float | None  # from PID 1's start to the first ready
    drain: str  # "" draining drained "failed: reason"
    reasons: tuple[str, ...]  # why the pod is not ready
    degraded: tuple[str, ...]  # problems that do not make it not ready
    conditions: tuple[ConditionView, ...]
    services: tuple[ServiceView, ...]  # in start order
    turn: str = ""  # "standby: ..." or "active, term 3" among several pods; "" for a pod alone


def to_mapping(snapshot: Snapshot) -> dict[str, Any]:
    mapping = fields(snapshot)
    mapping["services"] = [fields(view) for view in snapshot.services]
    mapping["conditions"] = [fields(view) for view in snapshot.conditions]
    return mapping


def from_mapping(data: Mapping[str, Any]) -> Snapshot:
    """Build the snapshot from a reply; ignore fields of a newer PID 1."""
    services = tuple(_view(ServiceView, item) for item in data["services"])
    conditions = tuple(_view(ConditionView, item) for item in data["conditions"])
    snapshot: Snapshot = _view(Snapshot, {**data, "services": services, "conditions": conditions})
    return snapshot


def _view(kind: Any, data: Mapping[str, Any]) -> Any:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return kind(**{name: values[name] for name in kind.__match_args__})


GREEN, YELLOW, RED, DIM, BOLD = "32", "33", "31", "2", "1"
_COLOURS = {"ready": GREEN, "done": GREEN, "failed": RED, "backoff": RED, "stopped": DIM}


def paint(text: str, code: str, on: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if on and text else text


def duration(seconds: float) -> str:
    """Format a duration with at most two units: 350ms, 4.2s, 3m12s, 2h05m, 4d03h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def headline(view: Snapshot, colour: bool) -> str:
    verdict = paint("ready", GREEN, colour) if view.ready else paint("not ready", RED, colour)
    parts = [f"{paint(view.pod or 'this pod', BOLD, colour)} ({view.role})", verdict, view.phase]
    if view.turn:
        parts.append(paint(view.turn, YELLOW if view.turn.startswith("standby") else GREEN, colour))
    if view.drain:
        parts.append(paint(view.drain, YELLOW, colour))
    parts.append(f"up {duration(view.uptime)}")
    if view.boot_seconds is not None:
        parts.append(f"ready after {duration(view.boot_seconds)}")
    return ", ".join(parts)


def note(view: ServiceView) -> str:
    """Return the most important fact about a service, in few words."""
    if view.reasons:
        return "; ".join(view.reasons)
    parts = []
    if view.status:
        parts.append(view.status)
    if view.failures:
        last = f", last: {view.last_exit}" if view.last_exit else ""
        parts.append(f"{view.failures} failure{'s' if view.failures > 1 else ''}{last}")
    elif view.starts > 1:
        parts.append(f"{'ran' if view.kind == 'periodic' else 'started'} {view.starts} times")
    if not view.required:
        parts.append("optional")
    return "; ".join(parts)


def table(snapshot: Snapshot, *, colour: bool, width: int = 100) -> str:
    lines = [headline(snapshot, colour)]
    lines += [f"  {paint('not ready:', RED, colour)} {reason}" for reason in snapshot.reasons]
    lines += [f"  {paint('degraded:', YELLOW, colour)} {reason}" for reason in snapshot.degraded]
    rows = [("SERVICE", "STATE", "FOR", "PID", "NOTE")]
    rows += [
        (view.name, view.state, duration(view.since), str(view.pid or "-"), note(view)) for view in snapshot.services
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines.append("")
    for place, row in enumerate(rows):
        cells = [cell.ljust(size) for cell, size in zip(row[:4], widths, strict=True)]
        room = max(20, width - sum(widths) - 8)
        text = row[4] if len(row[4]) <= room else f"{row[4][: room - 3]}..."
        if place == 0:
            lines.append(paint("  ".join([*cells, text]).rstrip(), DIM, colour))
            continue
        cells[1] = paint(cells[1], _COLOURS.get(row[1], YELLOW), colour)
        lines.append("  ".join([*cells, text]).rstrip())
    return "\n".join(lines)


def reasons(service: str | None, ready: bool, causes: Sequence[str], snapshot: Snapshot) -> str:
    subject = service or snapshot.pod or "the pod"
    view = next((view for view in snapshot.services if view.name == service), None)
    if ready:
        # An optional periodic service is ready even after a failed run.
        begins = f"{service}: " if service else ""
        extra = [
            f"  {'' if service else 'degraded: '}{reason}" for reason in snapshot.degraded if reason.startswith(begins)
        ]
        # The last line of a finished preparation tells what it learnt about this pod.
        extra += [f"  {view.last_line}"] if view and view.state == "done" and view.last_line else []
        state = "is degraded:" if service and service in _list_degraded(snapshot) else "is ready"
        return "\n".join([f"{subject} {state}", *extra])
    lines = [f"{subject} is not ready:"] + [f"  {reason}" for reason in causes or ("no reason is known",)]
    if view is not None:
        if view.last_exit:
            line = f": {view.last_line}" if view.last_line else ""
            lines.append(f"  last end: {view.last_exit}{line}")
        if view.next_start_in is not None:
            lines.append(f"  next start in {duration(view.next_start_in)}")
    return "\n".join(lines)


def _list_degraded(snapshot: Snapshot) -> set[str]:
    return {reason.partition(":")[0] for reason in snapshot.degraded}


def terminal_width() -> int:
    import shutil  # imported late: PID 1 loads this module too

    return shutil.get_terminal_size((100, 24)).columns
