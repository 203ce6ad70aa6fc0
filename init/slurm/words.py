"""What Slurm says of a new slurm.conf, in a sentence for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

NO_ANSWER = ("timed out", "Unable to contact slurm controller", "connect failure")
OVERLAP = 50  # lines by which two looks at a log are joined
# slurmctld quotes the rest of a line that it cannot read; a password that was put there is not for the pod's status.
_QUOTED_LINE = re.compile(r'(Parse error in file \S+ line \d+): ".*"')


def objection(stderr: str, directory: str) -> str:
    """Why a client does not read a candidate that lies in that directory, or nothing: it complains of much else."""
    if "fatal:" not in stderr:
        return ""
    errors = [line.partition("error: ")[2].strip() for line in stderr.splitlines() if "error: " in line]
    return tidy("; ".join(errors) or stderr.strip(), directory)


def complaint(log: Sequence[str], stderr: str) -> str:
    """Why slurmctld refused a file: it tells its log, and its client only "Unspecified error"."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    for mark in ("fatal: ", "error: "):
        found = [line.partition(mark)[2].strip() for line in log if mark in line]
        if found and (mark == "fatal: " or not said):
            return tidy(found[-1])
    return tidy(said[-1]) if said else "refused without a reason"


def new_lines(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """What a log that keeps only its newest lines has gained between two looks; all of it when nothing is left."""
    known = list(before[-OVERLAP:])
    for end in range(len(known), len(after) + 1):
        if list(after[end - len(known) : end]) == known:
            return list(after[end:])
    return list(after)


def unanswered(stderr: str) -> bool:
    """The client gave up waiting: slurmctld has not said no."""
    return any(words in stderr for words in NO_ANSWER)


def tidy(text: str, directory: str = "") -> str:
    text = _QUOTED_LINE.sub(r"\1", text)
    return text.replace(f"{directory}/", "") if directory else text
