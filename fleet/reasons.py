"""What the fleet writes into Slurm, and reads back: the reason of a drain, and beside it the mark that remembers it.

    Reason=minivm: fleet: cordon+going: fan 3; spot notice      Comment=minivm: fleet: held 1 cordon+going

Both are written by one call, so nothing that was done can be forgotten, and nothing is remembered that was not done.
A node that is marked and not drained has been resumed by somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ground.errors import one_line
from init.slurm.node import PREFIX

OURS = f"{PREFIX} fleet:"
# Without accounting Slurm keeps the reason of a drain that is lifted, and its own next drain would have it.
LIFTED = f"{OURS} lifted"
KIND = r"[a-z]+(?:\+[a-z]+)*"
_REASON = re.compile(rf"{re.escape(OURS)} ({KIND}): ")
_MARK = re.compile(rf"{re.escape(OURS)} held ([0-9]{{1,6}}) ({KIND})")
# Causes for which a node is down, so that its jobs run elsewhere: its machine is fenced, its pod is gone, the time that
# its jobs had is over.
DOWN = frozenset({"dead", "gone", "deadline"})
# Beside a goal: the pod that begins on such a node checks its machine deeply (health/broker/decide.py).
PROOF = "proof"
# What sinfo and people read; the rest of a page that somebody wrote into an annotation is in the annotation.
MOST = 160
AGAIN = " (again)"
# The broker parts a reason at "; " and knows its own checks by NAME[CLASS]@COMMIT: what a person wrote into a cordon
# must not pass for a verdict, or the broker would lift our drain when its checks pass.
_UNWANTED = re.compile(r"[\s\"'`|;\[\]()@=]+")


@dataclass(frozen=True, slots=True)
class Mark:
    """How often we have drained the node for these causes."""

    times: int
    kinds: frozenset[str]


def reason(causes: Mapping[str, str], times: int = 1) -> str:
    """Causes by kind, each in words; and whether somebody has lifted it before."""
    said = ", ".join(plain(words) for _, words in sorted(causes.items()))
    return f"{OURS} {'+'.join(sorted(causes))}: {said[:MOST].strip()}{AGAIN if times > 1 else ''}"


def plain(words: str) -> str:
    return _UNWANTED.sub(" ", one_line(words))[:MOST].strip() or "no reason given"


def kinds(reason: str) -> frozenset[str]:
    """The kinds of causes that a reason of ours names; none for anybody else's."""
    found = _REASON.match(reason)
    return frozenset(found[1].split("+")) if found else frozenset()


def mark_of(reason: str) -> Mark | None:
    """What a reason of ours says by itself, where the comment is a person's or went with an older record."""
    named = kinds(reason)
    return Mark(2 if AGAIN in reason else 1, named) if named else None


def comment(mark: Mark) -> str:
    return f"{OURS} held {mark.times} {'+'.join(sorted(mark.kinds))}"


def marked(comment: str) -> Mark | None:
    found = _MARK.fullmatch(comment)
    return Mark(int(found[1]), frozenset(found[2].split("+"))) if found else None


def free(comment: str) -> bool:
    """Whether a mark may stand there: a person's own comment is not written over."""
    return not comment or comment.startswith(OURS)
