"""The reason why no jobs come to this pod's node, from slurmctld, for a person who asks.

Only on request: pods that polled the controller would cost it a thousand calls.
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
WITHIN = 3.0  # a person is waiting


def standing(snapshot: Snapshot) -> str:
    """Return one line; "" if jobs come to the node or there is none."""
    if not any(view.name in DAEMONS and view.ready for view in snapshot.services):
        return ""
    name = pod_name(os.environ)
    try:
        node = client.node(name, client.address(os.environ), within=WITHIN)
    except SlurmError as error:
        return f"the node's state in Slurm is unknown: {error.why}"
    return words(node) if node is not None else f"slurmctld knows no node {name}"


def words(node: Node) -> str:
    """Describe the author, the time and the reason, and how a person can undo it."""
    if not (node.held_by_us or node.held_by_others):
        return "" if node.responds else "the node does not answer slurmctld, so no jobs come"
    user, _, since = node.author.partition("@")
    by = f" by {user} since {since}" if user else ""
    state = "drained" if "DRAIN" in node.flags else "down"
    return f"no jobs come: the node is {state} in Slurm{by}: {node.reason or 'no reason given'}"
