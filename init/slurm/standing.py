"""What keeps jobs off this pod's node, in slurmctld's words, for a person who asks why.

Only ever asked then: a pod that polled the controller would cost it a thousand calls.
"""

from __future__ import annotations

import os

from init.places import pod_name
from init.slurm import client
from init.slurm.client import SlurmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.slurm.node import Node
    from init.view.snapshot import Snapshot

DAEMONS = frozenset({"slurmd", "slurmd-static"})
WITHIN = 3.0  # a person waits


def standing(found: Snapshot) -> str:
    """A line, or nothing where jobs come to the node, or where there is none."""
    if not any(view.name in DAEMONS and view.ready for view in found.services):
        return ""
    name = pod_name(os.environ)
    try:
        node = client.node(name, client.address(os.environ), within=WITHIN)
    except SlurmError as error:
        return f"Slurm was not asked about the node: {error.why}"
    return words(node) if node is not None else f"slurmctld knows no node {name}"


def words(node: Node) -> str:
    """Who, since when, and why; how to take it back where that is a person's to do."""
    if not (node.held_by_us or node.held_by_others):
        return "" if node.responds else "the node does not answer slurmctld, so no jobs come"
    user, _, since = node.author.partition("@")
    by = f" by {user} since {since}" if user else ""
    state = "drained" if "DRAIN" in node.flags else "down"
    return f"no jobs come: the node is {state} in Slurm{by}: {node.reason or 'no reason given'}"
