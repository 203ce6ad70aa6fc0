"""A node as slurmctld describes it (`scontrol --oneliner show node`), and what a pod does about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from init.fields import number
from init.records import record

PREFIX = "minivm:"
STOPPING = f"{PREFIX} pod stops"
FRESH = f"{PREFIX} fresh pod"
# Set where a drain of ours is lifted: without accounting Slurm keeps the reason, and its own next drain would have it.
BACK = f"{PREFIX} pod is back"
HELD = frozenset({"DRAIN", "DOWN"})
SILENT = "Not responding"  # slurmctld's own reason, or what it adds to one that is there
ADDED = " : "
_KEY = re.compile(r"(?:^|\s)([A-Za-z]\w*)=")
# A person's reason may look like a key itself; Slurm ends it with its author. One that was carried over to a new record
# holds its true author, who stands first.
_REASON = re.compile(r"\sReason=(.*?)\s*\[([^\s@\[\]]+@[^\s\[\]]+)\]")


@record(frozen=True, slots=True)
class Node:
    name: str
    state: str  # "IDLE+DYNAMIC_NORM", "MIXED+DRAIN*"
    address: str
    reason: str
    started: str  # slurmd's start as slurmctld knows it; "None" before the first registration
    allocated: int  # CPUs
    author: str = ""  # of the reason: root@2026-11-20T10:32:18
    shown: tuple[tuple[str, str], ...] = ()  # every key as slurmctld tells it

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(self.state.rstrip("*~#!%$@^-").split("+"))

    @property
    def responds(self) -> bool:
        return not self.state.endswith("*") and "NOT_RESPONDING" not in self.flags

    @property
    def dynamic(self) -> bool:
        return "DYNAMIC_NORM" in self.flags

    @property
    def held_by_us(self) -> bool:
        """For a pod that goes or comes; a verdict's drain is the broker's, and nobody else's to lift."""
        first, *more = self.reason.split(ADDED)
        return bool(self.flags & HELD) and first in (STOPPING, FRESH) and set(more) <= {SILENT}

    @property
    def held_by_others(self) -> bool:
        """Drained by anybody else, or down for more than that it does not answer."""
        if not self.flags & HELD or self.held_by_us:
            return False
        return "DRAIN" in self.flags or not set(self.reason.split(ADDED)) <= {"", BACK, SILENT}

    @property
    def busy(self) -> bool:
        return self.allocated > 0 or bool(self.flags & {"ALLOCATED", "MIXED", "COMPLETING"})


def parse(line: str) -> Node:
    """One node's line. Reason may hold spaces and an author, so keys are found first and values lie between them."""
    found = list(_KEY.finditer(line))
    values: dict[str, str] = {}
    for this, following in zip(found, [*found[1:], None], strict=True):
        end = following.start() if following else len(line)
        values.setdefault(this[1], line[this.end() : end].strip())
    whole = _REASON.search(line)
    reason = whole[1] if whole else values.get("Reason", "")
    allocated = values.get("CPUAlloc", "0")
    return Node(
        name=values.get("NodeName", ""),
        state=values.get("State", "UNKNOWN"),
        address=values.get("NodeAddr", ""),
        reason=reason,
        started=values.get("SlurmdStartTime", "None"),
        allocated=number(allocated) or 0,
        author=whole[2] if whole else "",
        shown=tuple(values.items()),
    )


@record(frozen=True, slots=True)
class Fresh:
    """What a *fresh* pod does about the record of its name before slurmd starts, in this order."""

    free: bool = False  # the last pod's jobs are requeued one by one
    updates: tuple[tuple[str, ...], ...] = ()  # `scontrol update nodename=N ...`, one after the other
    forget: bool = False  # the record is deleted: slurmd registers what this pod offers
    born: str = ""  # and with this, so that a node that others hold is held from its first moment


def fresh(node: Node, address: str, *, differs: bool = False) -> Fresh:
    """Jobs of the last pod, its address and what it offered go; what others say of the node stays.

    `down` requeues the jobs that died with the last pod and that slurmctld still believes in. It replaces the reason
    and its author, so a node that others hold keeps its state, and its jobs are requeued by name. After `resume`
    slurmctld gives the node to nobody before slurmd has answered.
    """
    stale = not node.dynamic and bool(address) and node.address != address
    if node.dynamic and differs:
        # What a dynamic node offers is read when its record is made, and never again.
        down = ("state=down", f"reason={node.reason if node.held_by_others else FRESH}")
        born = born_held(node) if node.held_by_others else ""
        return Fresh(updates=(down,) if node.busy else (), forget=True, born=born)
    if node.held_by_others:
        return Fresh(free=node.busy, updates=((f"nodeaddr={address}",),) if stale else ())
    back = ("state=resume", f"reason={BACK}")
    if node.busy or stale:
        new = ((f"nodeaddr={address}",),) if stale else ()
        return Fresh(updates=(("state=down", f"reason={FRESH}"), *new, back))
    return Fresh(updates=(back,) if node.held_by_us else ())


def born_held(node: Node) -> str:
    """The same drain as words of slurmd's --conf; who set it, and when, goes into the reason."""
    reason = "".join(letter if letter.isprintable() and letter != '"' else "'" for letter in node.reason)
    author = f" [{node.author}]" if node.author else ""
    return f'State={"DRAIN" if "DRAIN" in node.flags else "DOWN"} Reason="{reason}{author}"'


def unproven(node: Node | None, name: str, addresses: Sequence[str]) -> str:
    """Why slurmctld does not know this pod's slurmd as it is, or nothing."""
    if node is None:
        return f"slurmctld knows no node {name} yet"
    if node.started in ("None", "", "Unknown"):
        return f"slurmd of {name} is not registered"
    if not node.responds:
        return f"slurmctld gets no answer from {name} at {node.address}"
    if addresses and re.fullmatch(r"[0-9.]+|[0-9a-f:]+", node.address) and node.address not in addresses:
        return f"slurmctld believes {name} to be at {node.address}, and it is at {', '.join(addresses)}"
    if "DOWN" in node.flags:
        return f"{name} is down in Slurm: {node.reason or 'no reason given'}"
    return ""
