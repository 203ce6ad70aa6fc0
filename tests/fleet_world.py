"""Both worlds, small and deterministic: they answer as the API server and slurmrestd do, and what is done to them is
checked against what must never happen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fleet.decide.actions import (
    Change,
    Cordon,
    Drain,
    Evict,
    Forget,
    Free,
    HideOnNode,
    Protect,
    ShowOnNode,
    ShowOnPod,
    Uncordon,
    Undrain,
)
from fleet.decide.decide import Decision, decide
from fleet.decide.memory import Memory
from fleet.policy import Policy
from fleet.world.kubernetes import kubernetes
from fleet.world.slurm import Seen, slurm
from fleet.world.world import Unknown, World

BEGIN = 1_790_000_000.0


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _shown(condition: tuple[str, str, str] | None) -> list[dict[str, str]]:
    if condition is None:
        return []
    status, reason, message = condition
    own = {"type": "minivm.io/SlurmState", "status": status, "reason": reason, "message": message}
    return [{**own, "lastTransitionTime": stamp(BEGIN)}]


@dataclass
class Node:
    uid: str
    version: int = 1
    cordoned: bool = False
    ready: bool = True
    since: float = BEGIN
    taints: dict[str, str] = field(default_factory=dict)
    signs: dict[str, str] = field(default_factory=dict)  # further conditions, type -> status
    annotations: dict[str, str] = field(default_factory=dict)
    condition: tuple[str, str, str] | None = None


@dataclass
class Pod:
    uid: str
    node: str
    version: int = 1
    ready: bool = True
    annotations: dict[str, str] = field(default_factory=dict)
    condition: tuple[str, str, str] | None = None
    free: bool = False


@dataclass
class SlurmNode:
    drained_by: str = ""  # "", "fleet", "person": the truth, whatever the reason says
    down: bool = False
    responds: bool = True
    reason: str = ""
    comment: str = ""
    jobs: set[int] = field(default_factory=set)
    suspended: set[int] = field(default_factory=set)

    @property
    def states(self) -> list[str]:
        found = ["DOWN" if self.down else "ALLOCATED" if self.jobs - self.suspended else "IDLE"]
        return [*found, *(["DRAIN"] if self.drained_by else []), *([] if self.responds else ["NOT_RESPONDING"])]


class Worlds:
    """`size` workers on as many Nodes, in pools of `pool`."""

    def __init__(self, size: int = 3, policy: Policy | None = None) -> None:
        self.now = BEGIN + 1000
        self.policy = policy or Policy()
        self.names = [f"w{number}" for number in range(size)]
        self.nodes = {f"n{number}": Node(f"node-{number}") for number in range(size)}
        self.pods = {name: Pod(f"pod-{name}-0", f"n{number}") for number, name in enumerate(self.names)}
        self.slurm = {name: SlurmNode() for name in self.names}
        self.memory = Memory()
        self.done: list[Change] = []
        self.count = 0

    # What a fleet sees.

    def world(self, *, blind: str = "") -> World:
        here = kubernetes(map(self._node, self.nodes), map(self._pod, self.pods))
        jobs = [
            {"job_id": job, "job_state": ["SUSPENDED" if job in node.suspended else "RUNNING"], "nodes": name}
            for name, node in self.slurm.items()
            for job in sorted(node.jobs)
        ]
        there = slurm([self._slurm(name) for name in self.slurm], jobs)
        return World(
            Unknown("no answer") if blind == "kubernetes" else here,
            Unknown("no answer") if blind == "slurm" else there,
        )

    def _node(self, name: str) -> dict[str, Any]:
        node = self.nodes[name]
        status = "True" if node.ready else "Unknown"
        ready = {"type": "Ready", "status": status, "lastTransitionTime": stamp(node.since)}
        return {
            "metadata": {
                "name": name,
                "uid": node.uid,
                "resourceVersion": str(node.version),
                "annotations": dict(node.annotations),
            },
            "spec": {
                "unschedulable": node.cordoned,
                "taints": [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in node.taints.items()],
            },
            "status": {
                "conditions": [
                    ready,
                    *({"type": type_, "status": said} for type_, said in node.signs.items()),
                    *_shown(node.condition),
                ],
            },
        }

    def _pod(self, name: str) -> dict[str, Any]:
        pod = self.pods[name]
        ready = {"type": "Ready", "status": str(pod.ready), "lastTransitionTime": stamp(BEGIN)}
        conditions = [ready, *_shown(pod.condition)]
        return {
            "metadata": {
                "name": name,
                "uid": pod.uid,
                "resourceVersion": str(pod.version),
                "labels": {"minivm.io/pool": "p", **({"minivm.io/free": "true"} if pod.free else {})},
                "annotations": dict(pod.annotations),
            },
            "spec": {"nodeName": pod.node},
            "status": {"conditions": conditions},
        }

    def _slurm(self, name: str) -> dict[str, Any]:
        node = self.slurm[name]
        return {
            "name": name,
            "state": node.states,
            "reason": node.reason,
            "comment": node.comment,
            "address": name,
            "alloc_cpus": len(node.jobs - node.suspended),
            "slurmd_start_time": {"set": True, "infinite": False, "number": 1},
        }

    # What a fleet does.

    def decide(self, world: World) -> Decision:
        return decide(world, self.memory, self.now, self.policy)

    def look(self, *, cut: int | None = None, blind: str = "", world: World | None = None) -> int:
        """One pass; `cut`: killed after so many changes, memory and all. How many were made."""
        decision = self.decide(world or self.world(blind=blind))
        if cut is not None:
            self.memory = Memory()
            for change in decision.changes[:cut]:
                self.perform(change)
            return min(cut, len(decision.changes))
        self.memory = decision.memory
        for change in decision.changes:
            self.perform(change)
        return len(decision.changes)

    def perform(self, change: Change) -> None:
        """As the adapters: nothing where what was seen is no longer so."""
        match change:
            case Drain() | Undrain() | Forget():
                node = self.slurm[change.name]
                if not self.still(change.name, change.was):
                    return
                if isinstance(change, Undrain):
                    at, machine = change.at, self.nodes[change.at.node]
                    if (str(self.pods[at.pod].version), str(machine.version)) != (at.pod_version, at.node_version):
                        return
                    cordoned = machine.cordoned and "minivm.io/cordoned" not in machine.annotations
                    assert not cordoned, "jobs come to a Node that is cordoned"
                    assert not machine.taints, "or tainted"
                    assert not self.pods[change.at.pod].free, "or others may evict its pod"
                self._change_slurm(change, node)
            case Evict():
                pod, node = self.pods[change.pod], self.slurm[change.pod]
                if not (self.still(change.pod, change.was) and self._pod_still(change)):
                    return
                assert pod.free, "its PodDisruptionBudget refuses"
                assert not node.jobs, "a pod is deleted while its node runs a job"
                assert node.drained_by, "and never one that may get a job in this moment"
                others = [one for name, one in self.pods.items() if not one.ready and name != change.pod]
                assert len(others) < self.policy.away, "more pods away than may be"
                self.replace(change.pod)
            case Free() | Protect():
                pod, node = self.pods[change.pod], self.slurm[change.pod]
                if not self._pod_still(change) or (isinstance(change, Free) and not self.still(change.pod, change.was)):
                    return
                if isinstance(change, Free):
                    assert node.drained_by, "others may evict a pod that may get a job in this moment"
                    assert not node.jobs, "or has one"
                pod.free, pod.version = isinstance(change, Free), pod.version + 1
            case ShowOnPod():
                pod = self.pods[change.pod]
                if pod.uid == change.uid:
                    pod.condition = (change.condition.status, change.condition.reason, change.condition.message)
                    pod.version += 1
            case ShowOnNode() | HideOnNode():
                seen = self.nodes[change.node]
                if seen.uid == change.uid:
                    shown = change.condition if isinstance(change, ShowOnNode) else None
                    seen.condition = (shown.status, shown.reason, shown.message) if shown else None
                    seen.version += 1
            case Cordon() | Uncordon():
                seen = self.nodes[change.node]
                if (seen.uid, str(seen.version)) != (change.uid, change.version):
                    return
                seen.cordoned, seen.version = isinstance(change, Cordon), seen.version + 1
                if isinstance(change, Cordon):
                    seen.annotations["minivm.io/cordoned"] = change.why
                else:
                    assert "minivm.io/cordoned" in seen.annotations, "a person's cordon is lifted"
                    del seen.annotations["minivm.io/cordoned"]
        self.done.append(change)

    def still(self, name: str, was: Seen) -> bool:
        node = self.slurm[name]
        now = (bool(node.drained_by), node.down, node.reason, node.comment)
        return (was.drained, was.down, was.reason, was.comment) == now

    def _pod_still(self, change: Free | Protect | Evict) -> bool:
        pod = self.pods[change.pod]
        return (pod.uid, str(pod.version)) == (change.uid, change.version)

    def _change_slurm(self, change: Drain | Undrain | Forget, node: SlurmNode) -> None:
        match change:
            case Drain(_, reason, comment, _):
                assert node.drained_by != "person", "a person's drain is written over"
                assert (node.down, node.drained_by) != (True, ""), "a node that is down for others is written over"
                node.drained_by, node.reason = "fleet", reason
            case Undrain(_, comment):
                assert node.drained_by == "fleet", "a drain is lifted that is not the fleet's"
                node.drained_by, node.reason = "", "minivm: fleet: lifted"
            case Forget():
                comment = ""
        if comment is not None:
            persons = node.comment and not node.comment.startswith("minivm: fleet:")
            assert not persons, "a person's comment is written over"
            node.comment = comment

    # What others do.

    def replace(self, name: str) -> None:
        """The pod goes and another of its name comes; it is ready when `settle` says so."""
        self.count += 1
        self.pods[name] = Pod(f"pod-{name}-{self.count}", self.pods[name].node, ready=False)
        self.jobs_end(name)

    def person_drains(self, name: str) -> None:
        node = self.slurm[name]
        node.drained_by, node.reason = "person", "look at fan 3"

    def person_resumes(self, name: str) -> None:
        node = self.slurm[name]
        node.drained_by, node.down = "", False

    def cordon(self, *names: str, on: bool = True) -> None:
        for node in map(self.nodes.__getitem__, names):
            if node.cordoned != on:
                node.cordoned, node.version = on, node.version + 1

    def taint(self, name: str, key: str | None, value: str = "x") -> None:
        node = self.nodes[name]
        node.taints, node.version = {key: value} if key else {}, node.version + 1

    def ready(self, name: str, on: bool = True) -> None:
        node = self.nodes[name]
        if node.ready != on:
            node.ready, node.since, node.version = on, self.now, node.version + 1

    def jobs_end(self, name: str) -> None:
        self.slurm[name].jobs.clear()
        self.slurm[name].suspended.clear()

    def all_leave(self) -> None:
        for name in self.names:
            self.annotate(name, "minivm.io/leave", "x")

    def annotate(self, name: str, key: str, value: str | None) -> None:
        pod = self.pods[name]
        if value is None:
            pod.annotations.pop(key, None)
        else:
            pod.annotations[key] = value
        pod.version += 1

    def settle(self, most: int = 30) -> None:
        """Everything else is well and quiet: how it ends."""
        for _ in range(most):
            for name, pod in self.pods.items():
                pod.ready = True
                self.slurm[name].responds, self.slurm[name].down = True, False
                self.jobs_end(name)
            self.now += 100
            if not self.look():
                return
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def settle_in(self, most: int = 10) -> None:
        """As everything is now."""
        for _ in range(most):
            if not self.look():
                return
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def end(self) -> object:
        """What must be the same however it came about: no times, no counters."""
        return (
            {name: (node.cordoned, sorted(node.annotations), node.condition) for name, node in self.nodes.items()},
            {name: (pod.uid.rpartition("-")[2] != "0", pod.condition, pod.free) for name, pod in self.pods.items()},
            {
                name: (node.drained_by, node.reason if node.drained_by else "", node.comment)
                for name, node in self.slurm.items()
            },
        )
