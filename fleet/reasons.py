"""Text that the fleet writes into Slurm and reads back: the reason of a drain, and the mark beside it.

    Reason=minivm: fleet: cordon+going: fan 3; spot notice      Comment=minivm: fleet: held 1 cordon+going

One update writes both, so reason and mark never disagree. If a marked node is not drained, a person resumed it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ground.errors import one_line
from init.slurm.node import PREFIX

OURS = f"{PREFIX} fleet:"
# Without accounting Slurm keeps the reason of a lifted drain, and would show it for Slurm's own next drain.
LIFTED = f"{OURS} lifted"
# Lower-case letters only: the fleet would neither recognize nor lift its drain for a kind with a digit.
KIND = r"[a-z]+(?:\+[a-z]+)*"
_REASON = re.compile(rf"{re.escape(OURS)} ({KIND}): ")
_MARK = re.compile(rf"{re.escape(OURS)} held ([0-9]{{1,6}}) ({KIND})")
# Letters of a user's text that are kept; the rest is in the annotation.
MOST = 160
AGAIN = " (again)"
# The broker splits a reason at "; " and knows its own checks by NAME[CLASS]@COMMIT. A user's text must not look like a
# verdict, or the broker would lift the drain when its checks pass.
_UNWANTED = re.compile(r"[\s\"'`|;\[\]()@=]+")


@dataclass(frozen=True, slots=True)
class Mark:
    """Number of drains that the fleet made for these causes."""

    times: int
    kinds: frozenset[str]


def reason(causes: Mapping[str, str], times: int = 1) -> str:
    """Build the reason from the causes; mark it if a person has lifted the drain before."""
    text = ", ".join(plain(words) for _, words in sorted(causes.items()))
    return f"{OURS} {'+'.join(sorted(causes))}: {text[:MOST].strip()}{AGAIN if times > 1 else ''}"


def plain(words: str) -> str:
    return _UNWANTED.sub(" ", one_line(words))[:MOST].strip() or "no reason given"


def kinds(reason: str) -> frozenset[str]:
    """Return the causes in a reason of the fleet; none for another author's reason."""
    match = _REASON.match(reason)
    return frozenset(match[1].split("+")) if match else frozenset()


def words_of(reason: str) -> str:
    """Return a reason of the fleet without its prefix and its causes' names."""
    return reason.removeprefix(OURS).strip().partition(": ")[2] or reason


def mark_of(reason: str) -> Mark | None:
    """Read the mark from a reason, where the comment is a person's or was lost with an older record."""
    named = kinds(reason)
    return Mark(2 if AGAIN in reason else 1, named) if named else None


def comment(mark: Mark) -> str:
    return f"{OURS} held {mark.times} {'+'.join(sorted(mark.kinds))}"


def marked(comment: str) -> Mark | None:
    match = _MARK.fullmatch(comment)
    return Mark(int(match[1]), frozenset(match[2].split("+"))) if match else None


def free(comment: str) -> bool:
    """Return whether the fleet may write a mark: it does not overwrite a person's comment."""
    return not comment or comment.startswith(OURS)
