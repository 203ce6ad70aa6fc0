"""The same as a file, topology.conf: the tree or blocks, for releases of Slurm that are told no places."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from fleet.policy import Topology
from fleet.world.kubernetes import Kubernetes
from fleet.world.snapshot import Worker

# What slurmctld calls the only topology where no file says anything; and what all is below.
NAME, ROOT = "default", "/"
# The other one, which a partition may name.
BLOCKS = "blocks"
# In place of a label that is not there.
UNKNOWN = "unknown"
# Of a switch's name in a file, to slurmctld.
MOST = 64
# Colons and commas part places, brackets are lists of names, and jobs read their switches with dots between.
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
# Each new name is one more switch to slurmctld until it is configured anew.
OFTEN, WITHIN_S = 5, 3600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Tells Slurm where a node is, while it still says of it what it said."""

    name: str
    place: str
    was: str


@dataclass(frozen=True, slots=True)
class PlaceHistory:
    """A node's place as it was last seen, and when it was another one before."""

    place: str
    times: tuple[float, ...] = ()


def part(value: str) -> str:
    """What a label says, as a name: two that differ stay so."""
    plain = _OTHER.sub("_", value)
    return (value or UNKNOWN) if plain == value else f"{plain}{_mark(value)}"


def _mark(value: str) -> str:
    """With a sign that no plain name has: what is shortened is nothing else's whole name."""
    return f"+{hashlib.sha256(value.encode(errors='backslashreplace')).hexdigest()[:8]}"


def _name(path: str, end: str) -> str:
    whole = f"{path}{end}"
    return whole if len(whole) <= MOST else f"{path[: MOST - 10]}{_mark(path)}{end}"


def switches(labels: Mapping[str, str], tiers: Iterable[str]) -> tuple[str, ...]:
    """From the root to the leaf."""
    parts = [part(labels.get(tier, "")) for tier in tiers]
    paths = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return (ROOT, *(_name(path, "/") for path in paths[:-1]), _name(paths[-1], ""))


def block(domain: str) -> str:
    """By the file and by a place the same."""
    return _name(part(domain), "")


def place(labels: Mapping[str, str], topology: Topology) -> str:
    """In each topology. Without tiers all are in one switch, which none of another policy has below it."""
    tree = ":".join((NAME, *switches(labels, topology.tiers or ("",))))
    if not topology.blocks.label:
        return tree
    # Slurm takes no place in a block that its file does not have.
    domain = labels.get(topology.blocks.label, "")
    return f"{tree},{BLOCKS}:{block(domain) if domain in topology.blocks.domains else UNKNOWN}"


def blockless(workers: Iterable[Worker], topology: Topology) -> tuple[str, ...]:
    """The domains of workers that the policy does not name."""
    label, known = topology.blocks.label, {"", *topology.blocks.domains}
    said = {worker.node.labels.get(label, "") for worker in workers if label and worker.node is not None}
    return tuple(sorted(said - known))


def due(worker: Worker, topology: Topology) -> Place | None:
    """None also where Slurm does not tell places; of a worker whose Node is not known, and of a static node."""
    known = worker.slurm
    if not topology.told or worker.node is None or known is None or known.topology is None or not known.record.dynamic:
        return None
    wanted = place(worker.node.labels, topology)
    return None if known.topology == wanted else Place(worker.name, wanted, known.topology)


def restless(moved: PlaceHistory | None, now: float) -> bool:
    return moved is not None and sum(now - at < WITHIN_S for at in moved.times) >= OFTEN


def remembered(workers: Iterable[Worker], before: Mapping[str, PlaceHistory], now: float) -> Mapping[str, PlaceHistory]:
    found = {}
    for worker in workers:
        if worker.slurm is not None and worker.slurm.topology is not None:
            here = worker.slurm.topology
            last = before.get(worker.name, PlaceHistory(here))
            times = tuple(at for at in last.times if now - at < WITHIN_S)
            found[worker.name] = PlaceHistory(here, times if here == last.place else (*times, now)[-OFTEN:])
    return found


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
