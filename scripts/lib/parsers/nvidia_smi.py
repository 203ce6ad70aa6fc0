"""Parser of `nvidia-smi -q`: one block per GPU, sections by indentation, "Key : Value" lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from health.api import Command, Unreadable

# One call serves every check of a round; it takes seconds without persistence mode.
NVIDIA_SMI = Command("nvidia_smi_q", ("nvidia-smi", "-q"), deadline_s=30.0, accept=(), evidence=True)

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
# Messages of nvidia-smi instead of an answer; each is a finding for the bus check.
COMPLAINTS = (
    re.compile(
        r"Unable to determine the device handle for (?:GPU|gpu)\s*(?P<gpu>\S*?):? (?:GPU is lost|Unknown Error)"
    ),
    re.compile(r"GPU is lost"),
    re.compile(r"No devices were found"),
    re.compile(r"couldn't communicate with the NVIDIA driver"),
    re.compile(r"Driver/library version mismatch"),
    re.compile(r"Failed to initialize NVML"),
)


def complaints(text: str) -> tuple[list[str], list[str]]:
    """Return lines without indentation: the tool's own, and those that a listed process's name may have added.

    Names of processes are printed unchanged. A line break in one has not been seen to come through, but is not ruled
    out.
    """
    own, _, rest = text.partition(" Process ID ")
    return [row.rstrip() for row in own.splitlines() if row[:1].strip()], [row.rstrip() for row in rest.split("\n")[1:]]


@dataclass(slots=True)
class Section:
    values: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)
    # "Process ID" starts a new entry each time: the only list that the tool prints.
    processes: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuReport:
    bus: str
    root: Section

    @property
    def model(self) -> str:
        return self.text("Product Name")

    @property
    def uuid(self) -> str:
        return self.text("GPU UUID")

    @property
    def serial(self) -> str:
        return self.root.values.get("Serial Number", "")

    @property
    def label(self) -> str:
        return f"GPU {self.bus[4:].lower()}"

    def section(self, *path: str) -> Section | None:
        section: Section | None = self.root
        for name in path:
            section = section.sections.get(name) if section else None
        return section

    def text(self, *path: str) -> str:
        """Return the value at the end of the path; Unreadable if the tool did not print it."""
        section = self.section(*path[:-1])
        if section is None or path[-1] not in section.values:
            raise Unreadable(f"nvidia-smi -q: {self.label} has no {' / '.join(path)}")
        return section.values[path[-1]]

    def count(self, *path: str) -> int | None:
        """Return a number, with or without a unit; None for N/A."""
        value = self.text(*path)
        if value in {"N/A", "[N/A]", "Not Supported", "[Not Supported]"}:
            return None
        match = re.fullmatch(r"(\d+)(?:\.\d+)?(?: ?(?:MiB|MHz|C|W|x|bank\(s\)|us))?", value)
        if match is None:
            raise Unreadable(f"nvidia-smi -q: {self.label}: {' / '.join(path)}: {value!r} is not a number")
        return int(match.group(1))

    def yes(self, *path: str) -> bool | None:
        value = self.text(*path)
        known = {"Yes": True, "No": False, "Active": True, "Not Active": False, "N/A": None, "Not Supported": None}
        if value not in known:
            raise Unreadable(f"nvidia-smi -q: {self.label}: {' / '.join(path)}: {value!r} is neither yes nor no")
        return known[value]


def parse(text: str) -> tuple[GpuReport, ...]:
    """Parse every GPU, or raise Unreadable: truncated or damaged output has fewer blocks than it announces."""
    if "NVSMI LOG" not in text:
        message = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise Unreadable(f"nvidia-smi said: {message[:200]}")
    match = re.search(r"^Attached GPUs\s*: (\d+)\s*$", text, re.MULTILINE)
    if match is None:
        raise Unreadable("nvidia-smi -q: no number of attached GPUs")
    gpus = tuple(_blocks(text))
    if len(gpus) != int(match.group(1)):
        raise Unreadable(f"nvidia-smi -q: {match.group(1)} GPUs attached, {len(gpus)} described")
    return gpus


def _blocks(text: str) -> Iterator[GpuReport]:
    gpu: GpuReport | None = None
    stack: list[tuple[int, Section]] = []
    # Bus -> True if a process was listed before it, whose name might look like a GPU's line.
    seen: dict[str, bool] = {}
    listed = False
    # The processes come last, with names that users choose: nothing after them describes the GPU.
    closed = False
    # Not splitlines: Python splits at half a dozen characters, and a name may contain any of them.
    for line in text.split("\n"):
        start = _GPU.match(line)
        if start and seen.get(start.group(1).lower()):
            raise Unreadable(f"nvidia-smi -q: GPU {start.group(1)} twice: one may be the name of a process")
        if start and start.group(1).lower() not in seen:
            if gpu:
                yield gpu
            gpu = GpuReport(start.group(1), Section())
            seen[start.group(1).lower()] = listed
            stack, closed = [(0, gpu.root)], False
            continue
        if gpu is None or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if closed and indent <= stack[-1][0]:
            continue
        while len(stack) > 1 and indent <= stack[-1][0]:
            stack.pop()
        section = stack[-1][1]
        key, colon, value = line.partition(" : ")
        key, value = key.strip(), value.strip()
        if not colon and line.rstrip().endswith(" :"):
            key, colon = line.rstrip()[:-2].strip(), ":"
        if not colon:
            section.sections[key] = Section()
            stack.append((indent, section.sections[key]))
            closed = closed or (key == "Processes" and section is gpu.root)
            continue
        if key == "Process ID":
            listed = True
            section.processes.append({})
        if section.processes:
            section.processes[-1][key] = value
        else:
            section.values[key] = value
            # "HW Slowdown : Active" has its causes one level deeper: they belong to the enclosing section.
    if gpu:
        yield gpu
