"""Format the snapshot as OpenMetrics text. Pure."""

from __future__ import annotations

from ground.metrics import labels
from init.engine.states import PodPhase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from init.view.snapshot import Snapshot

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
STATES = (
    "waiting", "preparing", "starting", "ready", "reloading", "handover", "stopping", "stopped", "backoff", "failed",
    "done", "failing",
)  # fmt: skip
PHASES = tuple(phase.value for phase in PodPhase)


def render(snapshot: Snapshot, counters: Mapping[str, int], handed: Sequence[str] = ()) -> str:
    """Format the families in the specification's order, ending in # EOF.

    `counters` are PID 1's own; `handed` are lines of services (init.view.handed).
    """
    out: list[str] = []

    def family(name: str, kind: str, text: str, samples: list[tuple[str, float | int]]) -> None:
        out.append(f"# TYPE {name} {kind}")
        out.append(f"# HELP {name} {text}")
        suffix = "_total" if kind == "counter" else "_info" if kind == "info" else ""
        out.extend(f"{name}{suffix}{tags} {float(value):g}" for tags, value in samples)

    services = snapshot.services
    family("minivm", "info", "The pod.", [(labels(role=snapshot.role, pod=snapshot.pod), 1)])
    family("minivm_ready", "gauge", "1 when the pod is ready.", [("", snapshot.ready)])
    family(
        "minivm_phase", "stateset", "What the pod is doing.",
        [(labels(minivm_phase=phase), phase == snapshot.phase) for phase in PHASES],
    )  # fmt: skip
    if snapshot.boot_seconds is not None:
        boot = [("", round(snapshot.boot_seconds, 6))]
        family("minivm_boot_seconds", "gauge", "From the start of PID 1 to the first ready.", boot)
    family("minivm_uptime_seconds", "gauge", "Since PID 1 began.", [("", round(snapshot.uptime, 3))])
    family(
        "minivm_service_ready", "gauge", "1 when the service is ready.",
        [(labels(service=view.name), view.ready) for view in services],
    )  # fmt: skip
    family(
        "minivm_service_state", "stateset", "What the service is doing.",
        [(labels(service=view.name, minivm_service_state=s), view.state == s) for view in services for s in STATES],
    )  # fmt: skip
    family(
        "minivm_service_starts", "counter", "Starts of the main process.",
        [(labels(service=view.name), view.starts) for view in services],
    )  # fmt: skip
    family(
        "minivm_service_failures", "counter", "Failures: of a start, of a run, of its readiness.",
        [(labels(service=view.name), view.failures) for view in services],
    )  # fmt: skip
    family(
        "minivm_condition", "gauge", "1 while a named condition holds.",
        [(labels(condition=item.name, blocking=str(item.blocking).lower()), 1) for item in snapshot.conditions],
    )  # fmt: skip
    if snapshot.turn:
        active, term, seconds = parse_turn(snapshot.turn)
        family("minivm_controller_active", "gauge", "1 in the controller that acts, 0 on standby.", [("", active)])
        if term:
            family("minivm_controller_term", "gauge", "The term of the controller that acts.", [("", term)])
        if seconds >= 0:
            text = "From the former controller's last sign of life, or the begin of its hand-over, to this slurmctld."
            family("minivm_controller_takeover_seconds", "gauge", text, [("", seconds)])
    for name, value in counters.items():
        family(f"minivm_{name}", "counter", COUNTERS[name], [("", value)])
    out += handed
    out.append("# EOF")
    return "\n".join(out) + "\n"


def parse_turn(turn: str) -> tuple[bool, int, float]:
    """Return if this controller acts, its term (0: unknown) and the seconds of its take-over (-1: unknown)."""
    words, _, how = turn.partition(": ")
    is_active, _, number = words.partition("active, term ")
    seconds = how.rpartition(" in ")[2].partition(" s, ")[0]
    if is_active or not number:
        return False, 0, -1.0
    plain = seconds.replace(".", "", 1)
    return True, int(number) if number.isdecimal() else 0, float(seconds) if plain.isdecimal() else -1.0


COUNTERS = {
    "impossible_events": "Events that came to a service in a phase that cannot have them: bugs of init.",
    "log_bytes": "Bytes written to standard output.",
    "log_lost_bytes": "Bytes lost to a full disk or a reader that is gone.",
    "reaped": "Processes reaped.",
    "syslog_dropped_lines": "Lines to the syslog socket beyond a user's share.",
    "wakeups": "Turns of the loop.",
}
