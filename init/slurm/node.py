"""A node as `scontrol --oneliner show node` describes it, and what a pod does about it. Pure.

- `parse` reads the line into a `Node`, which says who holds it: init itself, or a person, the broker or the fleet.
- `plan_fresh_start` plans what a new pod changes in its node's record before slurmd starts (`init.slurm.registration`).
- `unproven` says why slurmctld does not know this pod's slurmd (`init.slurm.registration`).
- `has_stale_address` tells if this pod's slurmd must register again (`init.helpers.serving`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from init.fields import number
from init.lean import record

PREFIX = "minivm:"
# Reasons that init sets for its own drains: of a pod that stops, and of a new one.
STOPPING = f"{PREFIX} pod stops"
FRESH = f"{PREFIX} fresh pod"
# Set when init lifts its drain: without accounting Slurm keeps the old reason and would reuse it for its next drain.
BACK = f"{PREFIX} pod is back"
HELD = frozenset({"DRAIN", "DOWN"})
SILENT = "Not responding"  # slurmctld's own reason, or its addition to an existing one
ADDED = " : "  # before such an addition
_KEY = re.compile(r"(?:^|\s)([A-Za-z]\w*)=")
# A person's reason may look like a key; Slurm puts the author at its end. A reason carried over to a new record
# contains its true author, which comes first.
_REASON = re.compile(r"\sReason=(.*?)\s*\[([^\s@\[\]]+@[^\s\[\]]+)\]")


@record(frozen=True, slots=True)
class Node:
    name: str
    state: str  # "IDLE+DYNAMIC_NORM", "MIXED+DRAIN*"
    address: str
    reason: str
    started: str  # slurmd's start time in slurmctld; "None" before the first registration
    allocated: int  # CPUs
    author: str = ""  # of the reason: root@2026-11-20T10:32:18
    shown: tuple[tuple[str, str], ...] = ()  # every key that slurmctld shows

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
        """True for init's own drain of a stopping or a new pod. Only the broker lifts a drain for a verdict."""
        first, *more = self.reason.split(ADDED)
        return bool(self.flags & HELD) and first in (STOPPING, FRESH) and set(more) <= {SILENT}

    @property
    def held_by_others(self) -> bool:
        """True if drained by anything else, or down for another reason than not answering."""
        if not self.flags & HELD or self.held_by_us:
            return False
        return "DRAIN" in self.flags or not set(self.reason.split(ADDED)) <= {"", BACK, SILENT}

    @property
    def busy(self) -> bool:
        return self.allocated > 0 or bool(self.flags & {"ALLOCATED", "MIXED", "COMPLETING"})


def parse(line: str) -> Node:
    """Parse one node's line. A reason may contain spaces and an author, so find the keys first."""
    keys = list(_KEY.finditer(line))
    values: dict[str, str] = {}
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        end = following.start() if following else len(line)
        values.setdefault(key[1], line[key.end() : end].strip())
    reason = _REASON.search(line)
    return Node(
        name=values.get("NodeName", ""),
        state=values.get("State", "UNKNOWN"),
        address=values.get("NodeAddr", ""),
        reason=reason[1] if reason else values.get("Reason", ""),
        started=values.get("SlurmdStartTime", "None"),
        allocated=number(values.get("CPUAlloc", "0")) or 0,
        author=reason[2] if reason else "",
        shown=tuple(values.items()),
    )


@record(frozen=True, slots=True)
class FreshStart:
    """Steps that a new pod takes, in this order, on its node's record before slurmd starts."""

    free_jobs: bool = False  # requeue the last pod's jobs one by one
    updates: tuple[tuple[str, ...], ...] = ()  # `scontrol update nodename=N ...`, one after the other
    delete_record: bool = False  # slurmd then registers this pod's resources
    born: str = ""  # slurmd's --conf: the node registers already drained


def plan_fresh_start(node: Node, address: str, *, differs: bool = False) -> FreshStart:
    """Plan the steps: drop the last pod's jobs, address and resources; keep states that people or the broker set.

    `down` requeues jobs that died with the last pod and that slurmctld still counts as running. It replaces the reason
    and its author, so a node that another actor drained keeps its state, and its jobs are requeued one by one. After
    `resume` slurmctld gives the node no job before slurmd has answered.
    """
    if node.dynamic and differs:
        # slurmctld reads a dynamic node's resources only when it creates the record.
        down = ("state=down", f"reason={node.reason if node.held_by_others else FRESH}")
        born = born_held(node) if node.held_by_others else ""
        return FreshStart(updates=(down,) if node.busy else (), delete_record=True, born=born)
    has_stale_address = not node.dynamic and bool(address) and node.address != address
    new_address = ((f"nodeaddr={address}",),) if has_stale_address else ()
    if node.held_by_others:
        return FreshStart(free_jobs=node.busy, updates=new_address)
    back = ("state=resume", f"reason={BACK}")
    if node.busy or has_stale_address:
        return FreshStart(updates=(("state=down", f"reason={FRESH}"), *new_address, back))
    return FreshStart(updates=(back,) if node.held_by_us else ())


def born_held(node: Node) -> str:
    """Format the same drain for slurmd's --conf; the reason contains its author and time."""
    reason = "".join(letter if letter.isprintable() and letter != '"' else "'" for letter in node.reason)
    author = f" [{node.author}]" if node.author else ""
    return f'State={"DRAIN" if "DRAIN" in node.flags else "DOWN"} Reason="{reason}{author}"'


def has_stale_address(node: Node, addresses: Sequence[str]) -> bool:
    """Tell if a record has the address of an earlier pod, as after a restore of slurmctld's state.

    A node that answers at another address is a second pod of this name, from which registering would take it.
    """
    return node.dynamic and not node.responds and bool(addresses) and _is_elsewhere(node, addresses)


def _is_elsewhere(node: Node, addresses: Sequence[str]) -> bool:
    return bool(re.fullmatch(r"[0-9.]+|[0-9a-f:]+", node.address)) and node.address not in addresses


def unproven(node: Node | None, name: str, addresses: Sequence[str]) -> str:
    """Return why slurmctld does not know this pod's slurmd correctly, else ""."""
    if node is None:
        return f"slurmctld knows no node {name} yet"
    if node.started in ("None", "", "Unknown"):
        return f"slurmd of {name} is not registered"
    if not node.responds:
        own = f", and the pod has {', '.join(addresses)}" if addresses and _is_elsewhere(node, addresses) else ""
        return f"slurmctld gets no answer from {name} at {node.address}{own}"
    if addresses and _is_elsewhere(node, addresses):
        return f"slurmctld has the address {node.address} for {name}, and the pod has {', '.join(addresses)}"
    if "DOWN" in node.flags:
        return f"{name} is down in Slurm: {node.reason or 'no reason given'}"
    return ""
