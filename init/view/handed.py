"""What health, gitsync and drift hand over for /metrics: the files they write for Prometheus, read when they change.

HTTP quotes no service (docs/decisions/http-quotes-no-service.md), so names and numbers pass and nothing else: families
under the service's own prefix, labels of a fixed list whose values are names, numbers as they stand. The file must be
root's, a plain one and small: nothing here waits, and nobody else can put words in.
"""

from __future__ import annotations

import os

from init.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = ("drift", "gitsync", "health")
# Not the signer, who is a person, nor an error's words.
LABELS = frozenset({"check", "class", "commit", "ref", "ring", "step"})
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
    """Each file, kept as lines until they change."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._kept: dict[str, tuple[tuple[int, int, int], list[str]]] = {}

    def lines(self) -> list[str]:
        return [line for service in SERVICES for line in self._of(service)]

    def _of(self, service: str) -> list[str]:
        try:
            fd = os.open(f"{self.directory}/{service}.prom", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []  # none is written, or PID 1 is short of descriptors: the next scrape has it
        try:
            found = os.fstat(fd)
            ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022
            if found.st_mode & _KIND != _PLAIN_FILE or not ours or found.st_size > LARGEST:
                return []
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if service not in self._kept or self._kept[service][0] != seen:
                text = os.read(fd, LARGEST).decode("ascii", "replace")
                self._kept[service] = (seen, open_metrics(text, f"minivm_{service}_"))
            return self._kept[service][1]
        except OSError:
            return []
        finally:
            os.close(fd)


def open_metrics(text: str, prefix: str) -> list[str]:
    """The families of Prometheus' text under `prefix`, as OpenMetrics: a counter's family is named without _total, and
    each stands together."""
    kinds: dict[str, str] = {}
    families: dict[str, dict[str, str]] = {}
    for line in text.splitlines()[: 3 * MOST_SAMPLES]:
        if line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            if kind in ("gauge", "counter"):
                kinds[name] = kind
            continue
        found = sample(line)
        if found is None or not found.name.startswith(prefix) or found.name not in kinds:
            continue
        tags = ",".join(f'{key}="{value}"' for key, value in found.labels)
        series = f"{found.name}{{{tags}}}" if tags else found.name
        if kinds[found.name] == "counter" and not found.name.endswith("_total"):
            continue
        families.setdefault(found.name, {}).setdefault(series, found.value)
    lines: list[str] = []
    for name, samples in families.items():
        family = name.removesuffix("_total") if kinds[name] == "counter" else name
        lines.append(f"# TYPE {family} {kinds[name]}")
        lines += [f"{series} {value}" for series, value in samples.items()]
    return lines


def sample(line: str) -> Sample | None:
    """`name{label="value"} number`, as far as it is one; labels that do not pass are left out."""
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
    """Each key and value of `{key="value",...}`, and where the next one begins; ends before what is none."""
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
