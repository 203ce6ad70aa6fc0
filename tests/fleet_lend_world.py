"""Both worlds with a pool that lends machines, foreign pods that find no room, and a scheduler that places them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from fleet.decide.actions import Change, Drain, Evict
from fleet.policy import Lend, Policy
from fleet.world import slurm
from fleet.world.guests import Guest, parse_guest
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot
from tests.fleet_pools_world import PoolWorlds
from tests.fleet_world import stamp

CLASS, NAMESPACE, NOTICE_S = "inference", "llm", 600.0
LENDS = Lend((NAMESPACE,), (CLASS,), {"w": 0.5}, NOTICE_S)
GPU = "nvidia.com/gpu"


@dataclass
class Asked:
    gpus: int
    created: float
    node: str = ""
    class_: str = CLASS
    # Further fields of its spec.
    more: dict[str, Any] | None = None
    # What keeps it away, whatever room there is.
    hindered: bool = False
    namespace: str = NAMESPACE


class LendWorlds(PoolWorlds):
    """Machines of 8 GPUs, of which a worker has all."""

    def __init__(self, size: int = 4, lend: Lend = LENDS, policy: Policy | None = None, **update: Any) -> None:
        self.asked: dict[str, Asked] = {}
        self.began: dict[str, float] = {}
        self.full = 8
        self.reserved: frozenset[str] | None = frozenset()  # None: not asked at this look
        self.silent: frozenset[str] = frozenset()  # namespaces of which nothing is known just now
        self.lends = False  # in this moment
        self.as_seen: set[str] = set()  # lent as this look saw it, and what it lends
        super().__init__(size, replace(policy or Policy(), lend=lend), per_node=True, **update)

    def world(self, *, blind: str = "") -> FleetSnapshot:
        found = super().world(blind=blind)
        if not isinstance(found.kubernetes, KubernetesView):
            return found
        known = [name for name, one in self.asked.items() if one.namespace not in self.silent]
        guests = None if blind == "guests" else tuple(map(self.guest, known))
        there = replace(found.slurm, reserved=self.reserved) if isinstance(found.slurm, SlurmView) else found.slurm
        return replace(
            found, kubernetes=replace(found.kubernetes, guests=guests, unknown_namespaces=self.silent), slurm=there
        )

    def guest(self, name: str) -> Guest:
        one = self.asked[name]
        container = {"name": "x", "resources": {"requests": {GPU: str(one.gpus)}}}
        no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        where = {"nodeName": one.node} if one.node else {}
        return parse_guest(
            {
                "metadata": {"name": name, "namespace": one.namespace, "creationTimestamp": stamp(one.created)},
                "spec": {"priorityClassName": one.class_, "containers": [container], **where, **(one.more or {})},
                "status": {"phase": "Running"} if one.node else {"phase": "Pending", "conditions": [no]},
            }
        )

    def _node(self, name: str) -> dict[str, Any]:
        item = super()._node(name)
        item["status"]["allocatable"] = {GPU: "8", "cpu": "128"}
        return item

    def _pod(self, name: str) -> dict[str, Any]:
        item = super()._pod(name)
        containers = item["spec"].setdefault("containers", [{"name": "worker"}])
        containers[0]["resources"] = {"requests": {GPU: str(self.full)}}
        return item

    # What others do.

    def wants_machine(
        self, name: str, gpus: int = 8, *, hindered: bool = False, namespace: str = NAMESPACE, **more: Any
    ) -> None:
        self.asked[name] = Asked(gpus, self.now, more=more or None, hindered=hindered, namespace=namespace)

    def schedules(self) -> None:
        for name, one in self.asked.items():
            for node in self.nodes if not (one.node or one.hindered) else ():
                used = sum(8 for pod in self.pods.values() if pod.node == node)
                used += sum(other.gpus for other in self.asked.values() if other.node == node)
                well = not self.nodes[node].cordoned and self.nodes[node].ready and not self.nodes[node].taints
                fits = self.guest(name).suits(node, self.nodes[node].labels, ())
                if used + one.gpus <= 8 and well and fits:
                    one.node = node
                    break

    def kubelets(self) -> None:
        """Run the kubelets; a pod whose machine is lent waits there for the foreign pod's end."""
        super().kubelets()
        self.schedules()

    def goes_on(self, seconds: float = 60, looks: int = 4) -> None:
        self.now += seconds
        for _ in range(looks):
            self.look()
            self.kubelets()
        self.look()

    # What there is, and what must never happen.

    def lent(self) -> set[str]:
        return {
            name
            for name, node in self.slurm.items()
            if node.drained_by == "fleet" and "lend" in slurm.causes_in(node.reason) and name in self.world_names()
        }

    def away(self) -> set[str]:
        gone = {name for name in self.lent() if name not in self.pods or name in self.leaving | self.unplaced}
        return set() if self.lends else super().away() - gone

    def _evicted(self, name: str) -> None:
        """Evict a pod; lent machines have a budget of their own, independent of other unavailable ones."""
        self.lends = name in self.lent()
        super()._evicted(name)
        self.lends = False

    def spare(self) -> set[str]:
        return self.lent()

    def kept_idle(self) -> set[str]:
        return super().kept_idle() - self.lent()

    def look(
        self,
        *,
        cut: int | None = None,
        blind: str = "",
        world: FleetSnapshot | None = None,
        away: Set[str] | None = None,
    ) -> int:
        """Look at an older `world`, whose unavailable pods were `away`: later ones could not count."""
        self.unforeseen = frozenset() if away is None else self.unavailable() - away
        seen = world or self.world(blind=blind)
        nodes = seen.slurm.nodes if isinstance(seen.slurm, SlurmView) else {}
        self.as_seen = {name for name, node in nodes.items() if "lend" in slurm.causes_in(node.reason)}
        return super().look(cut=cut, world=seen)

    def perform(self, change: Change) -> None:
        before = self.lent()
        match change:
            case Drain(name, reason) if "lend" in slurm.causes_in(reason) and self.still(name, change.precondition):
                if change.down:
                    assert self.now - self.began[name] >= NOTICE_S, "jobs end before their time is over"
                    assert name in before
                elif name not in before:
                    # What was seen is of each node as it is, and of all of them together as they were: a share is of
                    # these, and that nobody else lends meanwhile is the Lease's part.
                    assert name not in (self.reserved or ()), "it is promised to others"
                    share = self.policy.lend.pools.get("w", 0.0)
                    assert len(self.as_seen) < int(share * len(self.world_names())), "above budget"
                    self.as_seen.add(name)
                    self.began[name] = self.now
            case Evict(name) if "wanted by" in change.reason and self.still(name, change.precondition):
                assert name in before, "it is not drained for that"
        super().perform(change)

    def all_well(self) -> None:
        self.asked.clear()
        super().all_well()
