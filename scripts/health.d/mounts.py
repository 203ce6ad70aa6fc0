"""Mounts exist and answer. A hung server costs this check its deadline and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="mounts",
    about="network file systems are mounted and answer",
    class_=Class.NODE,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.BOOT}),
    sources=(Builtin("mounts", evidence=True),),
    thresholds="mounts",
    user_made=UserMade.PARTLY,
)

_ROW = re.compile(r"^(ok|hung|other|error:\S+) (-|\d+\.\d+) (\S+) (/.*)$")


@dataclass(frozen=True, slots=True)
class Mount:
    path: str
    kind: str
    state: str
    seconds: float


def parse(inputs: Inputs) -> list[Mount]:
    rows = inputs["mounts"].splitlines()
    last = re.fullmatch(r"# end: (\d+) asked", rows[-1]) if rows else None
    if last is None or rows[0] != "# mounts: state seconds type path":
        raise Unreadable("the list of mounts is cut, or is none")
    mounts = []
    for row in rows[1:-1]:
        match = _ROW.match(row)
        if match is None:
            raise Unreadable(f"mounts: {row[:80]!r}")
        state, seconds, kind, path = match.groups()
        mounts.append(Mount(path, kind, state, 0.0 if seconds == "-" else float(seconds)))
    if len([mount for mount in mounts if mount.state != "other"]) != int(last.group(1)):
        raise Unreadable("mounts: lines are missing")
    return mounts


def judge(measured: list[Mount], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    slow = limits.number("slow_s")
    there = {mount.path: mount for mount in measured}
    for path in limits.strings("required"):
        if path not in there:
            yield problem(
                f"{path} is not mounted", subject=path, measured="missing", threshold="mounted", user_made=False
            )
    checked = [mount for mount in measured if mount.state != "other"]
    if not checked:
        yield ok("no network file system is mounted")
    for mount in checked:
        if mount.state == "hung":
            message = f"{mount.path} ({mount.kind}) does not answer"
            yield problem(message, subject=mount.path, measured="hung", threshold="answers", user_made=False)
        elif mount.state != "ok":
            message = f"{mount.path} ({mount.kind}): {mount.state[6:].replace('_', ' ')}"
            yield problem(message, subject=mount.path, measured=mount.state, threshold="answers", user_made=False)
        elif mount.seconds > slow:
            # Any user who writes much makes it slow.
            message = f"{mount.path} ({mount.kind}) took {mount.seconds:.1f} s to answer"
            yield problem(message, subject=mount.path, measured=f"{mount.seconds:.1f}", threshold=f"{slow:g}")
        else:
            yield ok(
                f"{mount.path} answers", subject=mount.path, measured=f"{mount.seconds:.3f}", threshold=f"{slow:g}"
            )
