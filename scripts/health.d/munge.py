"""munge encodes and decodes on this node. Only the controller can tell if the key is the cluster's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="munge",
    about="munged encodes and decodes",
    class_=Class.NODE,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND}),
    sources=(Builtin("munge"),),
    thresholds="host",
    user_made=UserMade.PARTLY,
)

_STATUS = re.compile(r"^STATUS:\s+(\S.*?) \((\d+)\)$", re.MULTILINE)
_FAILED = re.compile(r"^(?:un)?munge: Error: (.+)$", re.MULTILINE)


def parse(inputs: Inputs) -> tuple[bool, str]:
    text = inputs["munge"]
    if text.strip() == "auth/slurm: munge is not used":
        return True, "not used, Slurm's daemons sign themselves"
    failed, status = _FAILED.search(text), _STATUS.search(text)
    if failed:
        return False, failed.group(1)[:200]
    if status is None:
        raise Unreadable(f"munge said: {text.strip()[:120]!r}")
    return status.group(2) == "0" and status.group(1) == "Success", f"{status.group(1)} ({status.group(2)})"


def judge(measured: tuple[bool, str], context: Context) -> Iterable[Finding]:
    good, message = measured
    if good:
        return [ok(f"munge: {message}")]
    # All users may connect to munged's socket, and a flood delays it.
    late = "timed" in message.lower()
    return [problem(f"munge: {message}", measured=message, threshold="Success (0)", user_made=late)]
