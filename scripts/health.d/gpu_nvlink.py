"""Check that every NVLink is up, and that the error counters do not grow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from health.api import Check, Class, Command, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_nvlink",
    about="all NVLinks of the model are up, without new errors",
    class_=Class.REBOOT,
    period_s=120,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(
        Command("nvlink_status", ("nvidia-smi", "nvlink", "--status"), deadline_s=20.0, evidence=True),
        Command("nvlink_errors", ("nvidia-smi", "nvlink", "-e"), deadline_s=20.0, evidence=True),
    ),
    thresholds="gpu",
)

_GPU = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+|GPU-x+)\)$")
_LINK = re.compile(r"^Link (\d+): (?:(\d+(?:\.\d+)?) GB/s|<(inactive)>)$")
_ERROR = re.compile(r"^Link (\d+): ([A-Z][\w ()/-]+): (\S.*)$")
# The link repairs replays and CRC errors itself; a recovery stops the traffic. Drivers from 5xx on with NVLink 5 have
# new counter names; counters without a limit are ignored.
COUNTERS = {
    "Replay Errors": "replay",
    "Recovery Errors": "recovery",
    "CRC Errors": "crc",
    "Malformed packet Errors": "crc",
    "Link recovery failed events": "recovery",
}


@dataclass(slots=True)
class GpuLinks:
    uuid: str
    label: str
    model: str
    speeds: dict[int, float | None] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    # Links that reported each counter: a missing line is not a zero.
    known: dict[str, set[int]] = field(default_factory=dict)


def parse(inputs: Inputs) -> list[GpuLinks]:
    by_uuid: dict[str, GpuLinks] = {}
    for links, line in _lines(inputs["nvlink_status"], by_uuid, "nvidia-smi nvlink --status"):
        match = _LINK.match(line)
        if match:
            links.speeds[int(match.group(1))] = None if match.group(3) else float(match.group(2))
        elif not line.startswith(("NVML", "Unable to retrieve NVLink")):
            raise Unreadable(f"nvidia-smi nvlink --status: {line[:80]!r}")
    for links, line in _lines(inputs["nvlink_errors"], by_uuid, "nvidia-smi nvlink -e"):
        match = _ERROR.match(line)
        if match is None:
            raise Unreadable(f"nvidia-smi nvlink -e: {line[:80]!r}")
        name = COUNTERS.get(match.group(2))
        if name is not None and match.group(3) != "N/A":
            if not match.group(3).isdigit():
                raise Unreadable(f"nvidia-smi nvlink -e: {line[:80]!r}")
            links.errors[name] = links.errors.get(name, 0) + int(match.group(3))
            links.known.setdefault(match.group(2), set()).add(int(match.group(1)))
    if not by_uuid:
        raise Unreadable("nvidia-smi nvlink: no GPU")
    for links in by_uuid.values():
        active = {link for link, speed in links.speeds.items() if speed is not None}
        silent = [name for name, known in links.known.items() if not active <= known]
        if silent or (active and not links.known):
            raise Unreadable(
                f"nvidia-smi nvlink -e: {links.label}: {(silent or ['the counters'])[0]} missing for some links"
            )
    return list(by_uuid.values())


def _lines(text: str, by_uuid: dict[str, GpuLinks], what: str) -> Iterable[tuple[GpuLinks, str]]:
    links: GpuLinks | None = None
    for row in text.splitlines():
        line = row.strip()
        match = _GPU.match(line)
        if match:
            links = by_uuid.setdefault(
                match.group(3), GpuLinks(match.group(3), f"GPU {match.group(1)}", match.group(2))
            )
        elif line and links is None:
            raise Unreadable(f"{what}: {line[:80]!r}")
        elif line and links is not None:
            yield links, line


def judge(measured: list[GpuLinks], context: Context) -> Iterable[Finding]:
    before = context.previous.get("errors", {})
    context.state["errors"] = {links.uuid: links.errors for links in measured}
    for links in measured:
        limits = context.limits.model(links.model)
        wanted, speed = limits.number("nvlinks"), limits.number("nvlink_speed_min_gbs")
        up = [link for link, value in links.speeds.items() if value is not None and value >= speed]
        if len(up) < wanted:
            down = sorted(set(links.speeds) - set(up))
            message = f"{links.label}: {len(up)} of {wanted:g} NVLinks are up"
            message += f" (not {', '.join(map(str, down))})" if down else ""
            yield problem(message, subject=links.uuid, measured=len(up), threshold=f"{wanted:g}")
            continue
        old = before.get(links.uuid)
        grown = {name: count - old.get(name, 0) for name, count in links.errors.items()} if old is not None else {}
        bad = {name: more for name, more in grown.items() if more > limits.number(f"nvlink_{name}_max")}
        if bad:
            name, more = max(bad.items(), key=lambda item: item[1])
            message = f"{links.label}: {more} new NVLink {name} errors since the last check"
            most = limits.number(f"nvlink_{name}_max")
            yield problem(message, subject=links.uuid, measured=more, threshold=f"{most:g}")
        else:
            yield ok(
                f"{links.label}: {len(up)} NVLinks up", subject=links.uuid, measured=len(up), threshold=f"{wanted:g}"
            )
