"""Snapshot of Kubernetes and Slurm at one moment, joined: a worker is a pod, its Node, and its node in Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleet.world.kubernetes import KubeCondition, KubeNode, KubePod, KubernetesView
from fleet.world.slurm import SlurmNode, SlurmView


@dataclass(frozen=True, slots=True)
class DeathProof:
    """Result of several fresh probes of a machine that looks dead."""

    # Seconds since its kubelet renewed its lease, measured by the fleet's own clock; None: not known.
    lease_age: float | None
    # Whether its kubelet's port answers; None: the Node has no usable address.
    kubelet: bool | None
    # Its pods that answer.
    pods: tuple[str, ...]
    # Most healthy kubelets answer; otherwise the fleet's own network may be cut.
    witness: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """A side that has not been read yet, does not answer, or answered too long ago. Never the same as empty."""

    why: str


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker. Its name is the pod's name and the node's name in Slurm."""

    name: str
    pod: KubePod
    node: KubeNode | None  # None: the pod is not scheduled, or its Node cannot be read
    slurm: SlurmNode | None  # None: Slurm has no such node, or its record cannot be read


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    kubernetes: KubernetesView | Unknown
    slurm: SlurmView | Unknown
    # By the Node of a machine that looks dead.
    proofs: Mapping[str, DeathProof] = field(default_factory=dict)
    clocks: str = ""  # why the time is not trusted
    # Slurm's last answer and its time, for display while slurmctld does not answer; no decision reads them.
    last: SlurmView | None = None
    last_at: float = 0.0
    # The conditions of the pods' pages, by the pod's uid; empty: the pod does not answer.
    pages: Mapping[str, tuple[KubeCondition, ...]] = field(default_factory=dict)

    def workers(self) -> Iterator[Worker]:
        """Yield the workers by name; none while one of the sides is unknown."""
        if isinstance(self.kubernetes, Unknown) or isinstance(self.slurm, Unknown):
            return
        for name, pod in sorted(self.kubernetes.pods.items()):
            yield Worker(name, pod, self.kubernetes.nodes.get(pod.node), self.slurm.nodes.get(name))

    def shown_workers(self) -> Iterator[Worker]:
        """Yield all workers in Kubernetes, for display; during an outage of slurmctld with their last known state."""
        if isinstance(self.kubernetes, Unknown):
            return
        slurm = self.last if isinstance(self.slurm, Unknown) else self.slurm
        for name, pod in sorted(self.kubernetes.pods.items()):
            yield Worker(name, pod, self.kubernetes.nodes.get(pod.node), slurm.nodes.get(name) if slurm else None)

    def orphans(self) -> Iterator[SlurmNode]:
        """Yield Slurm's nodes that belong to this release's sets and have no pod."""
        kubernetes = self.kubernetes
        if isinstance(kubernetes, Unknown) or isinstance(self.slurm, Unknown):
            return
        for name, node in sorted(self.slurm.nodes.items()):
            if name in kubernetes.pods or name in kubernetes.others or f"Pod/{name}" in kubernetes.unread:
                continue
            if node.record.dynamic and kubernetes.will_exist(name) is not None:
                yield node
