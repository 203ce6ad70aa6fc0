"""Both worlds with pools whose pods the fleet makes: each change to those is checked, too."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.decide.actions import Adopt, Change, CreatePod, Drain, Evict, NotePool
from fleet.decide.causes import OF_POOL, is_leaving
from fleet.policy import Policy
from fleet.world import slurm
from fleet.world.kubernetes import KubernetesView, assemble
from fleet.world.snapshot import FleetSnapshot
from fleet.world.worker_pool import WorkerPool, parse_pool, pool_status_json
from tests.fleet_world import Pod, SlurmNode, Worlds

POOL = "w"


@dataclass
class KeptPool:
    """A WorkerPool, as the API server keeps it."""

    spec: dict[str, Any]
    uid: str = "pool-w"
    version: int = 1
    generation: int = 1
    status: dict[str, Any] = field(default_factory=dict)


class PoolWorlds(Worlds):
    """One pool over `size` Nodes, settled; only the fleet makes its pods."""

    def __init__(self, size: int = 4, policy: Policy | None = None, *, per_node: bool = False, **update: Any) -> None:
        super().__init__(size, policy, f"{POOL}-n" if per_node else f"{POOL}-")
        self.sets = {}
        how: dict[str, Any] = {"mode": "perNode", "nodeSelector": {"gpu": "yes"}} if per_node else {"mode": "fixed"}
        more = {} if per_node else {"replicas": size}
        self.pool = KeptPool({**how, **more, "update": {"maxUnavailable": 1, **update}, "template": template("1")})
        self.owner = dict.fromkeys(self.pods, self.pool.uid)
        self.templates = dict.fromkeys(self.pods, self.read().hash)
        # Pools of others, as they are read.
        self.more: dict[str, WorkerPool] = {}
        # Pods that are told to go, and of which the kubelet has not said yet that they are gone.
        self.leaving: set[str] = set()
        # A pod of such a template never gets ready.
        self.broken: set[str] = set()
        # Those that no machine takes.
        self.unplaced: set[str] = set()
        # What somebody has written into the label of a pod that says of which template it is.
        self.labelled: dict[str, str] = {}
        # Those whose phase says that they have ended, and when such a one was sent away.
        self.over: set[str] = set()
        self.made_anew: list[tuple[str, float]] = []
        # Who went after the world was seen by which is decided: no budget could count them.
        self.unforeseen: Set[str] = frozenset()
        for node in self.nodes.values():
            node.labels["gpu"] = "yes"

    def read(self) -> WorkerPool:
        kept = self.pool
        metadata = {"name": POOL, "uid": kept.uid, "resourceVersion": str(kept.version), "generation": kept.generation}
        return parse_pool({"metadata": metadata, "spec": kept.spec, "status": kept.status})

    def wants_of_it(self, **spec: Any) -> None:
        """Change the pool's spec as a user does."""
        self.pool.spec = {**self.pool.spec, **spec}
        self.pool.version, self.pool.generation = self.pool.version + 1, self.pool.generation + 1

    def world(self, *, blind: str = "") -> FleetSnapshot:
        found = super().world(blind=blind)
        here = found.kubernetes
        if isinstance(here, KubernetesView):
            unsure = blind == "pools"
            pools = None if unsure else {POOL: self.read(), **self.more}
            everyone = {**here.pods, **here.others}
            made = assemble(
                here.nodes, everyone, here.sets, here.unread, here.machines, pools=pools, pools_unknown=unsure
            )
            return replace(found, kubernetes=replace(made, machines_unknown=here.machines_unknown))
        return found

    def _pod(self, name: str) -> dict[str, Any]:
        item = super()._pod(name)
        metadata = item["metadata"]
        labelled = self.labelled.get(name, self.templates[name])
        metadata["labels"] |= {"minivm.io/pool": POOL, "minivm.io/template": labelled}
        if self.templates[name]:
            env = [{"name": "MINIVM_TEMPLATE", "value": self.templates[name]}]
            item["spec"]["containers"] = [{"name": "worker", "env": env}]
        if self.owner[name]:
            metadata["ownerReferences"] = [{"kind": "WorkerPool", "uid": self.owner[name], "controller": True}]
        if name in self.leaving:
            metadata["deletionTimestamp"] = "2026-11-22T00:00:00Z"
        if name in self.unplaced:
            del item["spec"]["nodeName"]
        if name in self.over:
            item["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        return item

    def perform(self, change: Change) -> None:
        match change:
            case CreatePod(name, node):
                if name in self.pods:
                    return  # 409
                assert self.read().max_unavailable >= 0 and change.pool.uid == self.pool.uid
                where = node or next(iter(self._free_nodes()), "n0")
                self.born(name, where, change.pool.hash)
            case Adopt(name):
                pod = self.pods.get(name)
                if pod is None or (pod.uid, str(pod.version)) != (change.uid, change.version):
                    return
                assert not self.owner[name], "a pod of others is taken"
                self.owner[name], pod.version = self.pool.uid, pod.version + 1
            case NotePool(name, version, status) if name != POOL:
                assert version == self.more[name].version, "not the one that is there"
                self.more[name] = replace(self.more[name], status=status)
            case NotePool():
                if str(self.pool.version) != change.version:
                    return
                self.pool.status, self.pool.version = pool_status_json(change.status), self.pool.version + 1
            case Evict():
                if change.pod in self.leaving or not (
                    self.still(change.pod, change.precondition) and self._pod_still(change)
                ):
                    return
                self._evicted(change.pod)
            case Drain(name) if self.still(name, change.precondition):
                before = self.unavailable()
                super().perform(change)
                if name not in before and slurm.causes_in(change.reason) & OF_POOL:
                    away = self.unavailable() - self.unforeseen
                    assert len(away) <= max(self.read().max_unavailable, len(before - self.unforeseen)), "above budget"
                return
            case _:
                super().perform(change)
                return
        self.done.append(change)

    def comes(self, name: str) -> bool:
        return name in self.world_names()

    def _evicted(self, name: str) -> None:
        pod, node = self.pods[name], self.slurm.get(name)
        if name in self.over:  # the API server asks no budget for it, and waits for no kubelet
            idle = node is not None and not node.jobs
            quiet = node is None or node.down or (idle and (node.drained_by or not node.responds))
            assert quiet, "a pod goes whose slurmd is heard, and may have a job"
            self.made_anew.append((name, self.now))
            self.pod_goes(name)
            return
        if name not in self.unplaced:
            assert pod.free, "its PodDisruptionBudget refuses"
            # Of one that a person sends away it is enough that he has drained it.
            allowed = {"fleet", "person"} if "minivm.io/leave" in pod.annotations else {"fleet"}
            assert (node or SlurmNode(drained_by="fleet")).drained_by in allowed, "it is not drained by us"
        assert not (node.jobs if node else ()), "a pod is deleted while its node runs a job"
        if pod.ready and name not in self.spare():  # whom nobody misses may go whoever else is away
            missed = (self.away() | {name}) - self.spare()
            assert len(missed) <= self.read().max_unavailable, "more than maxUnavailable are away"
        pod.ready = False
        self.leaving.add(name)
        self.slurmd_goes(name)

    def kept_idle(self) -> set[str]:
        """Idle, and kept from jobs for the pool's sake."""
        slurm = self.world().slurm
        nodes = getattr(slurm, "nodes", {})
        return {name for name in self._own() if name in nodes and is_leaving(nodes[name]) and not self.slurm[name].jobs}

    def away(self) -> set[str]:
        """Those that are to be and are missing, and those that go or are not ready."""
        gone = {name for name in set(self.world_names()) - self.pods.keys() if self._takes(name)}
        return gone | {name for name in self._own() if not self.pods[name].ready or name in self.leaving}

    def _own(self) -> set[str]:
        return {name for name in self.pods if self.owner[name] in (self.pool.uid, "")}

    def spare(self) -> set[str]:
        """Those that nobody misses."""
        return set()

    def unavailable(self) -> set[str]:
        return self.away() | self.kept_idle()

    def _takes(self, name: str) -> bool:
        node = self.world_names()[name]
        return not node or not (self.nodes[node].cordoned or self.nodes[node].taints or not self.nodes[node].ready)

    def world_names(self) -> dict[str, str]:
        return dict(self.read().names({name: node.labels for name, node in self.nodes.items()}))

    def _free_nodes(self) -> list[str]:
        taken = {pod.node for pod in self.pods.values()}
        return [name for name in self.nodes if name not in taken]

    # What others do.

    def born(self, name: str, node: str, template: str, owner: str | None = None) -> None:
        self.count += 1
        self.pods[name] = Pod(f"pod-{name}-{self.count}", node, ready=False, created=self.now)
        self.owner[name] = self.pool.uid if owner is None else owner
        self.templates[name] = template
        if name not in self.names:
            self.names.append(name)

    def kubelets(self) -> None:
        """Remove the pods that are leaving; make new ones ready, unless they cannot be."""
        for name in sorted(self.leaving):
            self.pod_goes(name)
        self.leaving.clear()
        for name, pod in self.pods.items():
            kept = self.templates[name] in self.broken or name in self.unplaced | self.over
            if not pod.ready and not kept:
                pod.ready, pod.version = True, pod.version + 1
                self.slurmd_answers(name)

    def pod_goes(self, name: str) -> None:
        super().pod_goes(name)
        self.leaving.discard(name)
        self.unplaced.discard(name)
        self.over.discard(name)
        if name in self.slurm:
            self.jobs_end(name)
            self.slurmd_goes(name)

    def ends(self, name: str, *, lie: bool = False) -> None:
        """Its kubelet has evicted it; or somebody has written so, and all in it runs on."""
        pod = self.pods[name]
        pod.ready, pod.version = False, pod.version + 1
        self.over.add(name)
        if not lie:
            self.slurmd_goes(name)

    def replace(self, name: str, where: str = "") -> None:
        """Remove the pod; only the fleet makes a new one."""
        self.pod_goes(name)

    def roll(self, to: str, **update: Any) -> None:
        more = {"update": {**self.pool.spec["update"], **update}} if update else {}
        self.wants_of_it(template=template(to), **more)

    def turns(self, most: int = 60) -> int:
        """Look once a minute until there is nothing left to do; return the number of looks."""
        quiet = 0
        for number in range(most):
            quiet = 0 if self.look() else quiet + 1
            if quiet == 3:
                return number
            self.kubelets()
            self.now += 60
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def all_well(self) -> None:
        """Everything else is well and quiet, and goes on until nothing is left to do."""
        for name, node in self.slurm.items():
            node.comment = "" if node.comment == "Ann's" else node.comment
            if node.drained_by == "person":
                self.person_resumes(name)
        for name in self.nodes:
            self.ready(name)
            self.cordon(name, on=False)
        for name in self.pods:
            self.annotate(name, "minivm.io/leave", None)
        for name in self.over:
            self.slurmd_goes(name)
        quiet = 0
        for _ in range(150):
            quiet = 0 if self.look() else quiet + 1
            if quiet == 3:
                return
            for name in self.slurm:
                self.jobs_end(name)
            self.kubelets()
            for name in self.pods.keys() - self.leaving - self.over:
                self.slurmd_answers(name)
            self.now += 100
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def left_alone(self, number: int) -> None:
        """Remove the pod's owner, as when its creator has gone and left it."""
        if (name := f"{POOL}-{number}") in self.pods and not self.leaving & {name}:
            self.owner[name] = self.templates[name] = ""
            self.pods[name].version += 1

    def updated(self) -> set[str]:
        pool = self.read()
        return {name for name in self.pods if (self.templates[name] or pool.status.adopted) == pool.hash}

    def starts(self, name: str, job: int = 7) -> bool:
        """Start a job, where Slurm would place one."""
        node = self.slurm.get(name)
        if node is None or node.drained_by or node.down or not node.responds or name not in self.pods:
            return False
        node.jobs.add(job)
        return True


def template(said: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", "image": f"worker:{said}"}]}}


__all__ = ["POOL", "PoolWorlds", "SlurmNode", "template"]
