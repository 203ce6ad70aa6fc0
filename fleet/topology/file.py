"""The same as a file, topology.conf: the tree or blocks, for releases of Slurm that are told no places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from fleet.policy import Topology
from fleet.topology.place import switches
from fleet.world.kubernetes import Kubernetes


def conf(here: Kubernetes, topology: Topology) -> str:
    """Of a world the same bytes, whatever its order. A pod that has no Node yet is unknown."""
    return tree({name: switches(found, topology.tiers) for name, found in _labels(here).items()})


def _labels(here: Kubernetes) -> Mapping[str, Mapping[str, str]]:
    return {name: here.nodes[pod.node].labels if pod.node in here.nodes else {} for name, pod in here.pods.items()}


def blocks(here: Kubernetes, label: str, sizes: Iterable[int] = ()) -> str:
    """By the domain that the label names, as of NVLink. Without sizes the smallest block's: 24.11 takes none that is
    smaller than the first of them."""
    found: dict[str, set[str]] = {}
    for name, labels in _labels(here).items():
        found.setdefault(switches(labels, (label,))[-1], set()).add(name)
    wanted = list(sizes) or [min(map(len, found.values()))]
    lines = [f"BlockName={name} Nodes={','.join(sorted(found[name]))}" for name in sorted(found)]
    return "\n".join([*lines, f"BlockSizes={','.join(map(str, wanted))}"]) + "\n"


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
