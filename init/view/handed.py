"""Metrics files of health, gitsync and drift for /metrics, read again when they change.

HTTP shows no output of services (docs/decisions/http-without-service-output.md). Only names and numbers pass:
families under the service's own prefix, labels of a fixed list whose values are names, and numbers unchanged. The
file must be a small regular file of root: reading never blocks, and no other user can add text.
"""

from __future__ import annotations

import os

from init.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = ("drift", "gitsync", "health", "notify", "state")
# Not the signer, which is a person's name, nor the text of an error.
LABELS = frozenset({"channel", "check", "class", "commit", "ref", "ring", "step"})
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
