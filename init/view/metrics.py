"""The page `/metrics`: the pod's snapshot and the metrics files of some services, as OpenMetrics text.

`render` formats the snapshot and PID 1's own counters. `Handed` reads the files that health, gitsync, drift and other
services leave in a directory, again when they change, and adds their lines.

HTTP shows no output of services (docs/decisions/http-without-service-output.md). So only names and numbers of a file
pass: families under the service's own prefix, labels of a fixed list whose values are names, and numbers unchanged. The
file must be a small regular file of root: reading never blocks, and no other user can add text.

In `slurm/`, a directory that root gave to the user slurm, the file may be that user's. An old one is left out: its
writer runs on the acting controller alone, and writes nothing while slurmctld does not answer.
"""

from __future__ import annotations

import os
import time

from ground.metrics import labels
from init.engine.states import PodPhase
from init.lean import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from init.view.status import ServiceView, Snapshot

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
    lines = _info(snapshot) + _service_families(snapshot.services) + _conditions(snapshot)
    if snapshot.turn:
        lines += _controller_families(snapshot.turn)
    for name, value in counters.items():
        lines += _family(f"minivm_{name}", "counter", COUNTERS[name], [("", value)])
    return "\n".join([*lines, *handed, "# EOF"]) + "\n"


def _family(name: str, kind: str, about: str, samples: Sequence[tuple[str, float | int]]) -> list[str]:
    suffix = "_total" if kind == "counter" else "_info" if kind == "info" else ""
    lines = [f"# TYPE {name} {kind}", f"# HELP {name} {about}"]
    return lines + [f"{name}{suffix}{tags} {float(value):g}" for tags, value in samples]


def _info(snapshot: Snapshot) -> list[str]:
    phases = [(labels(minivm_phase=phase), phase == snapshot.phase) for phase in PHASES]
    lines = _family("minivm", "info", "The pod.", [(labels(role=snapshot.role, pod=snapshot.pod), 1)])
    lines += _family("minivm_ready", "gauge", "1 when the pod is ready.", [("", snapshot.ready)])
    lines += _family("minivm_phase", "stateset", "What the pod is doing.", phases)
    if snapshot.boot_seconds is not None:
        boot = [("", round(snapshot.boot_seconds, 6))]
        lines += _family("minivm_boot_seconds", "gauge", "From the start of PID 1 to the first ready.", boot)
    return lines + _family("minivm_uptime_seconds", "gauge", "Since PID 1 began.", [("", round(snapshot.uptime, 3))])


def _service_families(services: Sequence[ServiceView]) -> list[str]:
    states = [
        (labels(service=view.name, minivm_service_state=state), view.state == state)
        for view in services
        for state in STATES
    ]
    ready = [(labels(service=view.name), view.ready) for view in services]
    starts = [(labels(service=view.name), view.starts) for view in services]
    failures = [(labels(service=view.name), view.failures) for view in services]
    about_failures = "Failures: of a start, of a run, of its readiness."
    return [
        *_family("minivm_service_ready", "gauge", "1 when the service is ready.", ready),
        *_family("minivm_service_state", "stateset", "What the service is doing.", states),
        *_family("minivm_service_starts", "counter", "Starts of the main process.", starts),
        *_family("minivm_service_failures", "counter", about_failures, failures),
    ]


def _conditions(snapshot: Snapshot) -> list[str]:
    conditions = [
        (labels(condition=condition.name, blocking=str(condition.blocking).lower()), 1)
        for condition in snapshot.conditions
    ]
    return _family("minivm_condition", "gauge", "1 while a named condition holds.", conditions)


def _controller_families(turn: str) -> list[str]:
    """Format the state of one controller among several."""
    is_active, term, seconds = parse_turn(turn)
    about = "1 in the controller that acts, 0 on standby."
    lines = _family("minivm_controller_active", "gauge", about, [("", is_active)])
    if term:
        lines += _family("minivm_controller_term", "gauge", "The term of the controller that acts.", [("", term)])
    if seconds >= 0:
        about = "From the former controller's last sign of life, or the begin of its hand-over, to this slurmctld."
        lines += _family("minivm_controller_takeover_seconds", "gauge", about, [("", seconds)])
    return lines


def parse_turn(turn: str) -> tuple[bool, int, float]:
    """Tell if this controller acts; return its term (0: unknown) and the seconds of its takeover (-1: unknown)."""
    state, _, takeover = turn.partition(": ")  # "active, term 3: took over in 2.1 s, ...", or "standby: ..."
    before, _, term = state.partition("active, term ")
    if before or not term:
        return False, 0, -1.0
    seconds = takeover.rpartition(" in ")[2].partition(" s, ")[0]
    is_number = seconds.replace(".", "", 1).isdecimal()
    return True, int(term) if term.isdecimal() else 0, float(seconds) if is_number else -1.0


COUNTERS = {
    "impossible_events": "Events that came to a service in a phase that cannot have them: bugs of init.",
    "log_bytes": "Bytes written to standard output.",
    "log_lost_bytes": "Bytes lost to a full disk or a reader that is gone.",
    "reaped": "Processes reaped.",
    "syslog_dropped_lines": "Lines to the syslog socket beyond a user's share.",
    "wakeups": "Turns of the loop.",
}


# The metrics files of services.

SERVICES = ("drift", "gitsync", "health", "jobs", "keys", "notify", "runner", "state", "slurm/active", "slurm/nodes")
FRESH_S = 300.0
# Not the signer, which is a person's name, nor the text of an error.
LABELS = frozenset(
    ("cause", "channel", "check", "class", "commit", "file", "key", "name", "part", "partition", "ref", "ring", "state",
     "step")
)  # fmt: skip
LARGEST = 64 * 1024
MOST_SAMPLES = 1000
LONGEST_VALUE = 128
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")
_VALUE = _NAME | frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ.-/+: ")
_NUMBER = frozenset("0123456789.eE+-")
_REGULAR_FILE, _FILE_TYPE = 0o100000, 0o170000  # S_IFREG, S_IFMT; `stat` is not loaded for them


@record(frozen=True, slots=True)
class Sample:
    name: str
    labels: tuple[tuple[str, str], ...]
    value: str


class Handed:
    """The files' lines, cached until a file changes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._cache: dict[str, tuple[tuple[int, int, int], list[str]]] = {}

    def lines(self) -> list[str]:
        return [line for service in SERVICES for line in self._lines_of(service)]

    def _lines_of(self, service: str) -> list[str]:
        try:
            fd = os.open(f"{self.directory}/{service}.prom", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []  # no file yet, or PID 1 is short of descriptors: the next scrape has it
        try:
            status = os.fstat(fd)
            folder, _, name = service.rpartition("/")
            owners = {0, os.geteuid()}
            if folder:
                owners.add(os.stat(f"{self.directory}/{folder}").st_uid)  # noqa: PTH116 - PID 1 imports no pathlib
                if time.time() - status.st_mtime > FRESH_S:
                    return []
            is_trusted = status.st_uid in owners and not status.st_mode & 0o022
            if status.st_mode & _FILE_TYPE != _REGULAR_FILE or not is_trusted or status.st_size > LARGEST:
                return []
            identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if service not in self._cache or self._cache[service][0] != identity:
                text = os.read(fd, LARGEST).decode("ascii", "replace")
                self._cache[service] = (identity, open_metrics(text, f"minivm_{name}_"))
            return self._cache[service][1]
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
        parsed = parse_sample(line)
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


def parse_sample(line: str) -> Sample | None:
    """Parse `name{label="value"} number`, or return None; labels outside the list are dropped."""
    name_end = min(at for at in (line.find("{"), line.find(" "), len(line)) if at >= 0)
    name, rest = line[:name_end], line[name_end:]
    kept_labels: list[tuple[str, str]] = []
    if rest.startswith("{"):
        end = 1
        for key, value, after in _pairs(rest):
            end = after
            is_name = len(value) <= LONGEST_VALUE and _VALUE.issuperset(value)
            if key in LABELS and key not in dict(kept_labels) and is_name:
                kept_labels.append((key, value))
        if rest[end : end + 1] != "}":
            return None
        rest = rest[end + 1 :]
    value = rest.strip()
    is_number = 0 < len(value) < LONGEST_VALUE and _NUMBER.issuperset(value)
    if not name or not _NAME.issuperset(name) or not is_number:
        return None
    try:
        float(value)
    except ValueError:
        return None
    return Sample(name, tuple(kept_labels), value)


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
