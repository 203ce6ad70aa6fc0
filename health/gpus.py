"""Samples of this node's GPUs, use and counters, from the `nvidia-smi -q` that the checks read anyway.

A round leaves a sample for jobs' pages, and tells the jobs' black boxes which counters have moved since the sample
before. Between samples lies up to a minute; nothing is read for a job alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground.files import read_json, write_json
from health import black_box

SOURCE = "nvidia_smi_q"
LARGEST_AGE_S = 600.0  # an older sample says nothing of now
MOST = 64
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])[ \t]*$", re.MULTILINE)
_ATTACHED = re.compile(r"^Attached GPUs\s*: (\d{1,3})\s*$", re.MULTILINE)
# Processes come last in a block, with names that users choose.
_END = re.compile(r"^    Processes\b", re.MULTILINE)
_VALUES = {
    "minor": re.compile(r"^    Minor Number +: (\d{1,3})$", re.MULTILINE),
    "use": re.compile(r"^    Utilization\n(?:        .*\n)*?        Gpu +: (\d{1,3}) %$", re.MULTILINE | re.IGNORECASE),
    "memory": re.compile(r"^    FB Memory Usage\n(?:        .*\n)*?        Used +: (\d{1,9}) MiB$", re.MULTILINE),
    "room": re.compile(r"^    FB Memory Usage\n(?:        .*\n)*?        Total +: (\d{1,9}) MiB$", re.MULTILINE),
    "replays": re.compile(r"^        Replays Since Reset +: (\d{1,12})$", re.MULTILINE),
}
_VOLATILE = re.compile(r"^        Volatile\n((?:            .*\n?)+)", re.MULTILINE)
_ECC = re.compile(r"^ +(?:SRAM|DRAM) (Correctable|Uncorrectable).* : (\d{1,12})$", re.MULTILINE)
WORDS = {
    "ecc_uncorrected": "{} uncorrected memory errors (ECC) on {}",
    "ecc_corrected": "{} corrected memory errors (ECC) on {}",
    "replays": "{} PCIe replays on {}",
}


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU at one moment. `idle_since`: since when each sample has seen it unused; 0 while it is used."""

    minor: int
    bus: str
    use: int
    memory: int  # MiB
    room: int
    idle_since: float
    counts: Mapping[str, int]

    @property
    def label(self) -> str:
        return f"GPU {self.minor} ({self.bus})"


def parse(text: str, now: float, before: Mapping[int, GpuSample]) -> dict[int, GpuSample]:
    """Return the GPUs by their numbers; nothing from an answer that is cut, or that a process's name may have made."""
    starts = list(_GPU.finditer(text))[:MOST]
    attached = _ATTACHED.search(text)
    if attached is None or len({match[1] for match in starts}) != len(starts) or len(starts) != int(attached[1]):
        return {}
    samples: dict[int, GpuSample] = {}
    for place, match in enumerate(starts):
        block = text[match.end() : starts[place + 1].start() if place + 1 < len(starts) else len(text)]
        if ending := _END.search(block):
            block = block[: ending.start()]
        values = {name: int(value_match[1]) for name, value in _VALUES.items() if (value_match := value.search(block))}
        if not {"minor", "use", "memory", "room"} <= values.keys():
            continue  # a part of a GPU (MIG) has no use of its own
        counts = {"replays": values["replays"]} if "replays" in values else {}
        if volatile := _VOLATILE.search(block):
            for kind, number in _ECC.findall(volatile[1]):
                name = "ecc_corrected" if kind == "Correctable" else "ecc_uncorrected"
                counts[name] = counts.get(name, 0) + int(number)
        minor, use = values["minor"], values["use"]
        known = before.get(minor)
        idle = 0.0 if use else known.idle_since if known and known.idle_since else now
        bus = match[1][4:].lower().rpartition(".")[0]
        samples[minor] = GpuSample(minor, bus, use, values["memory"], values["room"], idle, counts)
    return samples


def grown(before: Mapping[int, GpuSample], after: Mapping[int, GpuSample]) -> Iterator[str]:
    """Say which counters moved. One that shrank was reset: its whole value is new."""
    for minor, gpu in after.items():
        old = before.get(minor)
        if old is not None and old.bus == gpu.bus:
            for name, number in black_box.grown(old.counts, gpu.counts).items():
                yield WORDS[name].format(number, gpu.label)


def take(path: Path, text: str, now: float) -> None:
    """Keep the sample of this round, and note in the open black boxes what moved."""
    at, before = read_samples(path)
    after = parse(text, now, before if now - at <= LARGEST_AGE_S else {})
    if after:
        black_box.see(grown(before, after), now)
        rows = [
            [gpu.minor, gpu.bus, gpu.use, gpu.memory, gpu.room, gpu.idle_since, dict(gpu.counts)]
            for gpu in after.values()
        ]
        write_json(path, {"at": now, "gpus": rows}, 0o600)


def read_samples(path: Path) -> tuple[float, dict[int, GpuSample]]:
    """Return the time of the last sample and its GPUs; damage counts as none."""
    data: Mapping[str, Any] = read_json(path)
    try:
        gpus = [
            GpuSample(int(minor), str(bus), int(use), int(memory), int(room), float(idle), dict(counts))
            for minor, bus, use, memory, room, idle, counts in data["gpus"][:MOST]
        ]
        return float(data["at"]), {gpu.minor: gpu for gpu in gpus}
    except (KeyError, TypeError, ValueError):
        return 0.0, {}


def describe_now(box: bytes, path: Path, now: float, tasks: Callable[[], Mapping[str, object]] = dict) -> bytes:
    """Return a line to lead a box: this node's clock; while the job runs, the last sample of its GPUs and its tasks."""
    entries = black_box.parse_lines(box)
    begins = [entry for entry in entries if entry.get("kind") in ("begin", "end")]
    runs = bool(begins) and begins[-1]["kind"] == "begin"
    wanted = begins[-1].get("gpus") if runs else None
    entry: dict[str, object] = {"kind": "now", **black_box.stamp(now), **(tasks() if runs else {})}
    if isinstance(wanted, list):
        at, samples = read_samples(path)
        if 0 <= now - at <= LARGEST_AGE_S:
            used = [samples[minor] for minor in wanted if minor in samples]
            rows = [[gpu.minor, gpu.use, gpu.memory, gpu.room, gpu.idle_since] for gpu in used]
            entry |= {"sampled": round(at, 3), "gpus": rows}
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"
