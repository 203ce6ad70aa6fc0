"""A snapshot of PID 1: the reply to `status`, and all that the command line needs to show."""

from __future__ import annotations

from init.lean import fields, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
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
