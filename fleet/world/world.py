"""Both sides at one moment, and what belongs together: a worker is a pod, its Node, and its node in Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleet.world.kubernetes import Kubernetes, Node, Pod
from fleet.world.slurm import Slurm, SlurmNode


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not asked yet, no answer, an answer that is too old. Never the same as nothing there."""

    why: str


@dataclass(frozen=True, slots=True)
class Worker:
    """The name is the pod's and the node's in Slurm."""

    name: str
    pod: Pod
    node: Node | None  # None: not scheduled, or its Node cannot be read
    slurm: SlurmNode | None  # None: Slurm has no such node, or it cannot be read


@dataclass(frozen=True, slots=True)
class World:
    kubernetes: Kubernetes | Unknown
    slurm: Slurm | Unknown

    def workers(self) -> Iterator[Worker]:
        """In the order of their names; none where one of the sides is not known."""
        if isinstance(self.kubernetes, Unknown) or isinstance(self.slurm, Unknown):
            return
        for name, pod in sorted(self.kubernetes.pods.items()):
            yield Worker(name, pod, self.kubernetes.nodes.get(pod.node), self.slurm.nodes.get(name))
