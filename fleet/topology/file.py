"""The same as a file, for releases of Slurm that are told no places: topology.conf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from fleet.policy import Topology
from fleet.topology.place import switches
from fleet.world.kubernetes import Kubernetes


def conf(here: Kubernetes, topology: Topology) -> str:
    """Of a world the same bytes, whatever its order. A pod that has no Node yet is unknown."""
    labels = {name: here.nodes[pod.node].labels if pod.node in here.nodes else {} for name, pod in here.pods.items()}
    return tree({name: switches(found, topology.tiers) for name, found in labels.items()})


def tree(paths: Mapping[str, Iterable[str]]) -> str:
    below: dict[str, set[str]] = {}
    nodes: dict[str, set[str]] = {}
    for name, path in paths.items():
        *_, leaf = path = tuple(path)
        nodes.setdefault(leaf, set()).add(name)
        for above, under in pairwise(path):
            below.setdefault(above, set()).add(under)
    lines = [f"SwitchName={name} Switches={','.join(sorted(below[name]))}" for name in sorted(below)]
    lines += [f"SwitchName={name} Nodes={','.join(sorted(nodes[name]))}" for name in sorted(nodes)]
    return "\n".join(lines) + "\n"
