"""Format the snapshot as OpenMetrics text. Pure."""

from __future__ import annotations

import os

from ground.metrics import labels
from init.engine.states import PodPhase
from init.lean import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from init.view.status import Snapshot

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
STATES = (
    "waiting", "preparing", "starting", "ready", "reloading", "handover", "stopping", "stopped", "backoff", "failed",
    "done", "failing",
)  # fmt: skip
PHASES = tuple(phase.value for phase in PodPhase)


def render(snapshot: Snapshot, counters: Mapping[str, int], handed: Sequence[str] = ()) -> str:
    """Format the families in the specification's order, ending in # EOF.

    `counters` are PID 1's own; `handed` are lines from files of services (see `Handed`).
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


# Metrics files of health, gitsync and drift for /metrics, read again when they change.
#
# HTTP shows no output of services (docs/decisions/http-without-service-output.md). Only names and numbers pass:
# families under the service's own prefix, labels of a fixed list whose values are names, and numbers unchanged. The
# file must be a small regular file of root: reading never blocks, and no other user can add text.


SERVICES = ("drift", "gitsync", "health", "jobs", "notify", "runner", "state")
# Not the signer, which is a person's name, nor the text of an error.
LABELS = frozenset({"cause", "channel", "check", "class", "commit", "ref", "ring", "state", "step"})
LARGEST = 64 * 1024
MOST_SAMPLES = 1000
LONGEST_VALUE = 128
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")
_VALUE = _NAME | frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ.-/+: ")
_NUMBER = frozenset("0123456789.eE+-")
_PLAIN_FILE, _KIND = 0o100000, 0o170000


@record(frozen=True, slots=True)
class Sample:
    name: str
    labels: tuple[tuple[str, str], ...]
    value: str


class Handed:
    """The files' lines, cached until a file changes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._kept: dict[str, tuple[tuple[int, int, int], list[str]]] = {}

    def lines(self) -> list[str]:
        return [line for service in SERVICES for line in self._of(service)]

    def _of(self, service: str) -> list[str]:
        try:
            fd = os.open(f"{self.directory}/{service}.prom", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []  # no file yet, or PID 1 is short of descriptors: the next scrape has it
        try:
            status = os.fstat(fd)
            is_trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            if status.st_mode & _KIND != _PLAIN_FILE or not is_trusted or status.st_size > LARGEST:
                return []
            identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if service not in self._kept or self._kept[service][0] != identity:
                text = os.read(fd, LARGEST).decode("ascii", "replace")
                self._kept[service] = (identity, open_metrics(text, f"minivm_{service}_"))
            return self._kept[service][1]
        except OSError:
            return []
        finally:
            os.close(fd)


def open_metrics(text: str, prefix: str) -> list[str]:
    """Convert the families of Prometheus' text under `prefix` to OpenMetrics.

    A counter's family is named without _total, and the lines of a family are kept together.
    """
    kinds: dict[str, str] = {}
    families: dict[str, dict[str, str]] = {}
    for line in text.splitlines()[: 3 * MOST_SAMPLES]:
        if line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            if kind in ("gauge", "counter"):
                kinds[name] = kind
            continue
        parsed = sample(line)
        if parsed is None or not parsed.name.startswith(prefix) or parsed.name not in kinds:
            continue
        tags = ",".join(f'{key}="{value}"' for key, value in parsed.labels)
        series = f"{parsed.name}{{{tags}}}" if tags else parsed.name
        if kinds[parsed.name] == "counter" and not parsed.name.endswith("_total"):
            continue
        families.setdefault(parsed.name, {}).setdefault(series, parsed.value)
    lines: list[str] = []
    for name, samples in families.items():
        family = name.removesuffix("_total") if kinds[name] == "counter" else name
        lines.append(f"# TYPE {family} {kinds[name]}")
        lines += [f"{series} {value}" for series, value in samples.items()]
    return lines


def sample(line: str) -> Sample | None:
    """Parse `name{label="value"} number`, or return None; labels outside the list are dropped."""
    end = min(at for at in (line.find("{"), line.find(" "), len(line)) if at >= 0)
    name, rest = line[:end], line[end:]
    labels: list[tuple[str, str]] = []
    if rest.startswith("{"):
        at = 1
        for key, value, after in _pairs(rest):
            at = after
            if key in LABELS and key not in dict(labels) and len(value) <= LONGEST_VALUE and _VALUE.issuperset(value):
                labels.append((key, value))
        if rest[at : at + 1] != "}":
            return None
        rest = rest[at + 1 :]
    value = rest.strip()
    if not name or not _NAME.issuperset(name) or not 0 < len(value) < LONGEST_VALUE or not _NUMBER.issuperset(value):
        return None
    try:
        float(value)
    except ValueError:
        return None
    return Sample(name, tuple(labels), value)


def _pairs(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield each key and value of `{key="value",...}` and the position after it; stop at invalid text."""
    at = 1
    while (equals := text.find('="', at)) > 0:
        key, start = text[at:equals], equals + 2
        end = start
        while end < len(text) and text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        if end >= len(text):
            return
        at = end + 2 if text[end + 1 : end + 2] == "," else end + 1
        yield key, text[start:end], at
        if text[at : at + 1] == "}":
            return
