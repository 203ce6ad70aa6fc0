"""Ethernet interfaces in the thresholds are up, with their MTU and speed, and do not flap."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parsers.blocks import blocks, integer

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, When, ok, problem

NAMES = ("operstate", "mtu", "speed", "carrier_changes")

CHECK = Check(
    name="ethernet",
    about="interfaces are up, with MTU and speed, without flaps",
    class_=Class.NODE,
    period_s=120,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    sources=(Files("ethernet", tuple(f"/sys/class/net/*/{name}" for name in NAMES), evidence=True),),
    thresholds="ethernet",
)

_PATH = re.compile(r"/sys/class/net/([^/]+)/(\w+)")
STATES = {"up", "down", "unknown", "dormant", "lowerlayerdown", "notpresent", "testing"}


@dataclass(frozen=True, slots=True)
class EthernetInterface:
    name: str
    state: str
    mtu: int
    # None if the kernel does not report it (a virtual interface, or one that is down).
    speed: int | None
    changes: int


def parse(inputs: Inputs) -> list[EthernetInterface]:
    files: dict[str, dict[str, str]] = {}
    for path, text in blocks(inputs["ethernet"]).items():
        match = _PATH.fullmatch(path)
        if match is None:
            raise Unreadable(f"no file of an interface: {path}")
        files.setdefault(match.group(1), {})[match.group(2)] = text
    interfaces = []
    for name, values in sorted(files.items()):
        for needed in ("operstate", "mtu", "carrier_changes"):
            if needed not in values:
                raise Unreadable(f"{name} has no {needed}")
        if values["operstate"] not in STATES:
            raise Unreadable(f"{name}: state {values['operstate']!r}")
        speed = integer(values["speed"], f"{name}: speed") if "speed" in values else None
        interfaces.append(
            EthernetInterface(
                name,
                values["operstate"],
                integer(values["mtu"], f"{name}: mtu"),
                None if speed is None or speed < 0 else speed,
                integer(values["carrier_changes"], f"{name}: carrier_changes"),
            )
        )
    return interfaces


def judge(measured: list[EthernetInterface], context: Context) -> Iterable[Finding]:
    rules = context.limits.default.mapping("interfaces")
    before = context.previous.get("changes", {})
    context.state["changes"] = {link.name: link.changes for link in measured}
    judged = 0
    for pattern, rule in rules.items():
        matching = [link for link in measured if fnmatchcase(link.name, pattern)]
        if len(matching) < rule["count_min"]:
            message = f"{len(matching)} interfaces called {pattern}"
            yield problem(message, subject=pattern, measured=len(matching), threshold=rule["count_min"])
        for link in matching:
            judged += 1
            yield _one(link, rule, before.get(link.name))
    if not judged:
        raise Unreadable("no interface that the thresholds name")


def _one(link: EthernetInterface, rule: dict[str, float], before: int | None) -> Finding:
    # A carrier lost and found again is two changes.
    flaps = 0 if before is None else max(0, link.changes - before) // 2
    shown = f"{link.name}: {link.state}, MTU {link.mtu}, " + (f"{link.speed} Mb/s" if link.speed else "speed unknown")
    if link.state not in {"up", "unknown"}:
        return problem(f"{link.name} is {link.state}", subject=link.name, measured=link.state, threshold="up")
    if link.mtu < rule["mtu_min"]:
        return problem(shown, subject=link.name, measured=link.mtu, threshold=rule["mtu_min"])
    if link.speed is not None and link.speed < rule["speed_min_mbs"]:
        return problem(shown, subject=link.name, measured=link.speed, threshold=rule["speed_min_mbs"])
    if flaps > rule["flaps_max"]:
        message = f"{link.name}: {flaps} flaps since the last check"
        return problem(message, subject=link.name, measured=flaps, threshold=rule["flaps_max"])
    return ok(shown, subject=link.name, measured=link.mtu, threshold=rule["mtu_min"])
