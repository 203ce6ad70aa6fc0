"""A node as slurmctld describes it (`scontrol --oneliner show node`), and what a pod does about it. Pure."""

from __future__ import annotations

import re

from init.fields import number
from init.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = "minivm:"
STOPPING = f"{PREFIX} pod stops"
FRESH = f"{PREFIX} fresh pod"
_KEY = re.compile(r"(?:^|\s)([A-Za-z]\w*)=")


@record(frozen=True, slots=True)
class Node:
    name: str
    state: str  # "IDLE+DYNAMIC_NORM", "MIXED+DRAIN*"
    address: str
    reason: str
    started: str  # slurmd's start as slurmctld knows it; "None" before the first registration
    allocated: int  # CPUs

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
    def drained_by_others(self) -> bool:
        return "DRAIN" in self.flags and not self.reason.startswith((STOPPING, FRESH))

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
    # A person's reason may look like a key itself; Slurm ends it with its author.
    whole = re.search(r"\sReason=(.*?)\s*\[[^\s@\[\]]+@[^\s\[\]]+\]", line)
    reason = whole[1] if whole else values.get("Reason", "")
    allocated = values.get("CPUAlloc", "0")
    return Node(
        name=values.get("NodeName", ""),
        state=values.get("State", "UNKNOWN"),
        address=values.get("NodeAddr", ""),
        reason=reason,
        started=values.get("SlurmdStartTime", "None"),
        allocated=number(allocated) or 0,
    )


def fresh_updates(node: Node, address: str) -> list[list[str]]:
    """What a *fresh* pod tells slurmctld before slurmd starts, as arguments of `scontrol update nodename=N`.

    Down requeues the jobs that died with the last pod and that slurmctld still believes in; the address replaces the
    cached one of the last pod (a static node would look idle, and srun would hang). Resume lifts a drain too, so that
    one which somebody else has set is set again, with its reason.
    """
    updates: list[list[str]] = []
    stale_address = not node.dynamic and bool(address) and node.address != address
    if node.busy or stale_address:
        updates.append(["state=down", f"reason={FRESH}"])
        if stale_address:
            updates.append([f"nodeaddr={address}"])
        updates.append(["state=resume"])
        if node.drained_by_others:
            updates.append(["state=drain", f"reason={node.reason}"])
    elif node.flags & {"DRAIN", "DOWN"} and node.reason.startswith((STOPPING, FRESH)):
        updates.append(["state=resume"])
    return updates


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
