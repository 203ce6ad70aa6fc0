"""A worker's place in Slurm's topology, derived from the labels of its own Node only.

A switch is named by its whole path, with a final slash unless it is a leaf: `dc1/`, `dc1/row-4/`, `dc1/row-4/r7`. So
each switch has one parent and one depth for all present and past labels: Slurm stores the places of nodes with its
jobs, and does not start if two contradict each other. Slurm's file lists the blocks; a place cannot create one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from fleet.decide.actions import Place, PlaceHistory
from fleet.policy import Topology
from fleet.world.kubernetes import KubernetesView
from fleet.world.snapshot import Worker

# Slurm's name for the only topology without a file, and the root switch.
NAME, ROOT = "default", "/"
# The block topology, which a partition may name.
BLOCKS = "blocks"
# Replaces a missing label.
UNKNOWN = "unknown"
# Letters of a switch's name that slurmctld accepts in a file.
MOST = 64
# Colons and commas separate places, brackets lists of names, and dots the switches that a job reads.
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
# Each new name adds a switch to slurmctld until it is reconfigured.
OFTEN, WITHIN_S = 5, 3600.0


def part(value: str) -> str:
    """Make a name of a label's value; two different values stay different."""
    plain = _OTHER.sub("_", value)
    return (value or UNKNOWN) if plain == value else f"{plain}{_suffix(value)}"


def _suffix(value: str) -> str:
    """Return a hash behind a plus sign, which no plain name has: a shortened name never equals another full name."""
    return f"+{hashlib.sha256(value.encode(errors='backslashreplace')).hexdigest()[:8]}"


def _name(path: str, end: str) -> str:
    whole = f"{path}{end}"
    return whole if len(whole) <= MOST else f"{path[: MOST - 10]}{_suffix(path)}{end}"


def switches(labels: Mapping[str, str], tiers: Iterable[str]) -> tuple[str, ...]:
    """Return the switches from the root to the leaf."""
    parts = [part(labels.get(tier, "")) for tier in tiers]
    paths = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return (ROOT, *(_name(path, "/") for path in paths[:-1]), _name(paths[-1], ""))


def block(domain: str) -> str:
    """Return a block's name, the same in Slurm's file and in a place."""
    return _name(part(domain), "")


def place(labels: Mapping[str, str], topology: Topology) -> str:
    """Return the place in each topology. Without tiers all nodes are in one switch, which no other policy extends."""
    tree = ":".join((NAME, *switches(labels, topology.tiers or ("",))))
    if not topology.blocks.label:
        return tree
    # Slurm refuses a place in a block that its file does not list.
    domain = labels.get(topology.blocks.label, "")
    return f"{tree},{BLOCKS}:{block(domain) if domain in topology.blocks.domains else UNKNOWN}"


def find_unlisted_domains(workers: Iterable[Worker], topology: Topology) -> tuple[str, ...]:
    """Return the domains of workers that the policy does not list."""
    label, listed = topology.blocks.label, {"", *topology.blocks.domains}
    domains = {worker.node.labels.get(label, "") for worker in workers if label and worker.node is not None}
    return tuple(sorted(domains - listed))


def find_due_place(worker: Worker, topology: Topology) -> Place | None:
    """Return the change of a worker's place; None for static nodes, unknown Nodes, and Slurm before 25.05."""
    node = worker.slurm
    if not topology.is_set or worker.node is None or node is None or node.topology is None or not node.record.dynamic:
        return None
    target = place(worker.node.labels, topology)
    return None if node.topology == target else Place(worker.name, target, node.topology)


def is_restless(history: PlaceHistory | None, now: float) -> bool:
    return history is not None and sum(now - at < WITHIN_S for at in history.times) >= OFTEN


def remember_places(
    workers: Iterable[Worker], before: Mapping[str, PlaceHistory], now: float
) -> Mapping[str, PlaceHistory]:
    histories = {}
    for worker in workers:
        if worker.slurm is not None and worker.slurm.topology is not None:
            current = worker.slurm.topology
            last = before.get(worker.name, PlaceHistory(current))
            times = tuple(at for at in last.times if now - at < WITHIN_S)
            histories[worker.name] = PlaceHistory(current, times if current == last.place else (*times, now)[-OFTEN:])
    return histories


# The file topology.conf, for Slurm before 25.05, which takes no places of single nodes.


def conf(kubernetes: KubernetesView, topology: Topology) -> str:
    """Render the tree; its bytes do not depend on the order of objects. A pod without a Node is at an unknown place."""
    return tree({name: switches(labels, topology.tiers) for name, labels in _labels(kubernetes).items()})


def _labels(kubernetes: KubernetesView) -> Mapping[str, Mapping[str, str]]:
    nodes = kubernetes.nodes
    return {name: nodes[pod.node].labels if pod.node in nodes else {} for name, pod in kubernetes.pods.items()}


def blocks(kubernetes: KubernetesView, label: str, sizes: Iterable[int] = ()) -> str:
    """Render blocks by the domain in a label. Without sizes the smallest block counts: 24.11 accepts none below it."""
    nodes_of_block: dict[str, set[str]] = {}
    for name, labels in _labels(kubernetes).items():
        nodes_of_block.setdefault(switches(labels, (label,))[-1], set()).add(name)
    block_sizes = list(sizes) or [min(map(len, nodes_of_block.values()))]
    lines = [f"BlockName={name} Nodes={','.join(sorted(nodes_of_block[name]))}" for name in sorted(nodes_of_block)]
    return "\n".join([*lines, f"BlockSizes={','.join(map(str, block_sizes))}"]) + "\n"


def tree(paths: Mapping[str, Iterable[str]]) -> str:
    below: dict[str, set[str]] = {}
    nodes: dict[str, set[str]] = {}
    for name, path in paths.items():
        *_, leaf = switch_path = tuple(path)
        nodes.setdefault(leaf, set()).add(name)
        for above, under in pairwise(switch_path):
            below.setdefault(above, set()).add(under)
    lines = [f"SwitchName={name} Switches={','.join(sorted(below[name]))}" for name in sorted(below)]
    lines += [f"SwitchName={name} Nodes={','.join(sorted(nodes[name]))}" for name in sorted(nodes)]
    return "\n".join(lines) + "\n"
