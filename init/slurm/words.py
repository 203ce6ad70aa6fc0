"""Slurm's messages about a new slurm.conf, as a sentence for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

NO_ANSWER = ("timed out", "Unable to contact slurm controller", "connect failure")
OVERLAP = 50  # lines by which two reads of a log are joined
# slurmctld quotes the rest of a line that it cannot parse; a password in it must not reach the pod's status.
_QUOTED_LINE = re.compile(r'(Parse error in file \S+ line \d+): ".*"')


def objection(stderr: str, directory: str) -> str:
    """Return why a client cannot read a candidate in that directory, or ""; other complaints are ignored."""
    if "fatal:" not in stderr:
        return ""
    errors = [line.partition("error: ")[2].strip() for line in stderr.splitlines() if "error: " in line]
    return tidy("; ".join(errors) or stderr.strip(), directory)


def complaint(log: Sequence[str], stderr: str) -> str:
    """Return why slurmctld refused a file: its log tells, its client only prints "Unspecified error"."""
    messages = [line.strip() for line in stderr.splitlines() if line.strip()]
    for mark in ("fatal: ", "error: "):
        marked = [line.partition(mark)[2].strip() for line in log if mark in line]
        if marked and (mark == "fatal: " or not messages):
            return tidy(marked[-1])
    return tidy(messages[-1]) if messages else "refused without a reason"


def new_lines(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines added to a log between two reads, where the log keeps only its newest; all if none remain."""
    known = list(before[-OVERLAP:])
    for end in range(len(known), len(after) + 1):
        if list(after[end - len(known) : end]) == known:
            return list(after[end:])
    return list(after)


def unanswered(stderr: str) -> bool:
    """Tell if the client gave up waiting: slurmctld has not refused."""
    return any(words in stderr for words in NO_ANSWER)


def tidy(text: str, directory: str = "") -> str:
    text = _QUOTED_LINE.sub(r"\1", text)
    return text.replace(f"{directory}/", "") if directory else text
