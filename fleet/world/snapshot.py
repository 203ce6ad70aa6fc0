"""Both sides at one moment, and what belongs together: a worker is a pod, its Node, and its node in Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleet.world.kubernetes import Kubernetes, Node, Pod
from fleet.world.slurm import Slurm, SlurmNode


@dataclass(frozen=True, slots=True)
class Proof:
    # Seconds since its kubelet renewed its lease, as we have seen it; None: not known.
    lease_age: float | None
    # Whether its kubelet's port answers; None: it has no address.
    kubelet: bool | None
    # Those of its pods that answer.
    pods: tuple[str, ...]
    # Whether a machine that is well was reached in the same way: else the network may be cut on our side.
    witness: bool


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
class Snapshot:
    kubernetes: Kubernetes | Unknown
    slurm: Slurm | Unknown
    # Of machines that look dead, by Node.
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    clocks: str = ""  # why the hour is not believed
    # Slurm's last answer and its time, for display while slurmctld does not answer; no decision reads them.
    last: Slurm | None = None
    last_at: float = 0.0

    def workers(self) -> Iterator[Worker]:
        """In the order of their names; none where one of the sides is not known."""
        if isinstance(self.kubernetes, Unknown) or isinstance(self.slurm, Unknown):
            return
        for name, pod in sorted(self.kubernetes.pods.items()):
            yield Worker(name, pod, self.kubernetes.nodes.get(pod.node), self.slurm.nodes.get(name))

    def shown_workers(self) -> Iterator[Worker]:
        """Every worker that Kubernetes knows, for display; during an outage of slurmctld with its last known state."""
        if isinstance(self.kubernetes, Unknown):
            return
        known = self.last if isinstance(self.slurm, Unknown) else self.slurm
        for name, pod in sorted(self.kubernetes.pods.items()):
            yield Worker(name, pod, self.kubernetes.nodes.get(pod.node), known.nodes.get(name) if known else None)

    def orphans(self) -> Iterator[SlurmNode]:
        """Slurm's nodes whose pods are not there, of this release's sets and of nobody else's."""
        if isinstance(self.kubernetes, Unknown) or isinstance(self.slurm, Unknown):
            return
        here = self.kubernetes
        for name, node in sorted(self.slurm.nodes.items()):
            if name in here.pods or name in here.others or f"Pod/{name}" in here.unread:
                continue
            if node.record.dynamic and here.made(name) is not None:
                yield node
