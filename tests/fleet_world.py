"""Both worlds, small and deterministic: they answer as the API server and slurmrestd do.

Each change is checked against the invariants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.act.watch_cache import ParsedObjects
from fleet.decide.actions import (
    Annotate,
    CallHook,
    Change,
    Cordon,
    Delete,
    Drain,
    Evict,
    Fence,
    FleetMemory,
    Forget,
    Free,
    HideOnNode,
    Make,
    NotePool,
    Place,
    Protect,
    Record,
    Remove,
    RestartSlurmd,
    ShowOnNode,
    ShowOnPod,
    ShowStates,
    SlurmGuardedPodChange,
    StartJob,
    Uncordon,
    Undrain,
    Unfence,
    Withdraw,
    change_key,
)
from fleet.decide.causes import SETS_DOWN
from fleet.decide.decide import Decision, decide
from fleet.decide.remediation import in_treatment
from fleet.policy import Policy
from fleet.world import slurm
from fleet.world.fields import Object
from fleet.world.kubernetes import RESTART, KubernetesView, assemble
from fleet.world.machine import MachineObject, MachineStatus, machine_status_json, parse_machine
from fleet.world.slurm import Precondition, parse_slurm
from fleet.world.snapshot import DeathProof, FleetSnapshot, Unknown
from health.broker.decide import BrokerNode as Asked
from health.broker.decide import asks_for_deep


class CutInAJob(Exception):
    pass


# What says how things are, and changes nothing of them.
DISPLAY = (ShowOnPod, ShowStates, ShowOnNode, Record, NotePool)
BEGIN = 1_790_000_000.0
OUT = "node.kubernetes.io/out-of-service"
# The fleet's own cordon. A machine can write what it likes into its annotations, and no label of this kind.
OURS = "minivm.node-restriction.kubernetes.io/cordoned"
MARK = "lab.slurm"  # of the fleet under test
FENCED = "minivm.node-restriction.kubernetes.io/fenced"


def kubernetes(nodes: Iterable[Object], pods: Iterable[Object], sets: Iterable[Object] | None = None) -> KubernetesView:
    """Parse the API server's lists as the fleet does."""
    read = {kind: ParsedObjects(kind, MARK) for kind in ("Node", "Pod", "StatefulSet")}
    for kind, listed in (("Node", nodes), ("Pod", pods), ("StatefulSet", sets or ())):
        for item in listed:
            read[kind].take(item)
    unread = {**read["Node"].unread, **read["Pod"].unread}
    kept = None if sets is None else read["StatefulSet"].objects
    return assemble(read["Node"].objects, read["Pod"].objects, kept, unread, fleet_mark=MARK)


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
    dead: bool = False  # the truth; not ready may be a cut cable too
    version: int = 1
    cordoned: bool = False
    ready: bool = True
    since: float = BEGIN
    taints: dict[str, str] = field(default_factory=dict)
    signs: dict[str, str] = field(default_factory=dict)  # further conditions, type -> status
    said: str = ""  # their message
    annotations: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    condition: tuple[str, str, str] | None = None
    provider: str = ""
    boot: int = 1


@dataclass
class Kept:
    """A Machine, as the API server keeps it."""

    uid: str
    version: int = 1
    generation: int = 1
    spec: dict[str, str] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)


@dataclass
class Pod:
    uid: str
    node: str
    version: int = 1
    ready: bool = True
    created: float = BEGIN
    annotations: dict[str, str] = field(default_factory=dict)
    condition: tuple[str, str, str] | None = None
    states: dict[str, tuple[str, str]] = field(default_factory=dict)  # those that Slinky's operator shows
    free: bool = False
    lost: bool = False  # freed for that
    gpus: tuple[str, ...] = ()
    deep: tuple[str, str] | None = None  # what it says of a deep check: status and message
    revision: str = "w-1"
    leaving: bool = False


@dataclass
class SlurmNode:
    drained_by: str = ""  # "", "fleet", "person": the truth, whatever the reason says
    down: bool = False
    responds: bool = True
    reason: str = ""
    comment: str = ""
    since: float = 0.0
    # The pod that it was last set down without, or for: a younger one's slurmd lifts that by its registration.
    down_for: str = ""
    jobs: set[int] = field(default_factory=set)
    suspended: set[int] = field(default_factory=set)
    place: str = ""

    @property
    def states(self) -> list[str]:
        found = ["DOWN" if self.down else "ALLOCATED" if self.jobs - self.suspended else "IDLE"]
        return [*found, *(["DRAIN"] if self.drained_by else []), *([] if self.responds else ["NOT_RESPONDING"])]


class Worlds:
    """`size` workers on as many Nodes, in pools of `pool`."""

    def __init__(self, size: int = 3, policy: Policy | None = None, prefix: str = "w") -> None:
        self.now = BEGIN + 1000
        self.policy = policy or Policy()
        self.names = [f"{prefix}{number}" for number in range(size)]
        # Of "w-": a StatefulSet's; the names of others are not known to any.
        self.sets: dict[str, int] | None = {"w": size}
        self.revision = "w-1"  # of the StatefulSet's template
        # The controller's pod, on a Node of its own or with a worker.
        self.controller = Pod("controller-0", f"n{size - 1}")
        self.cut_off = False  # the fleet itself reaches nobody but the API server
        self.returns = True  # ReturnToService=2: a slurmd that lives registers again, whatever its node is down for
        self.deaf: set[str] = set()  # those whose slurmd does not register
        self.dull: set[str] = set()  # pods of images that show no annotation to their init
        self.pending: set[str] = set()  # nodes that a pending job names
        self.nodes = {f"n{number}": Node(f"node-{number}") for number in range(size)}
        self.pods = {name: Pod(f"pod-{name}-0", f"n{number}") for number, name in enumerate(self.names)}
        self.slurm = {name: SlurmNode() for name in self.names}
        # What was done to machines: where, and which number it said.
        self.treated: list[tuple[str, str]] = []
        self.jobs: list[str] = []
        self.left_in_job = False  # killed once when a Job is started and not yet noted
        # Of hardware; None: the fleet keeps none.
        self.machines: dict[str, Kept] | None = None
        self.memory = FleetMemory()
        self.done: list[Change] = []
        self.count = 0
        # What each deep check says: status, how many checks, words; "": nothing is ever told.
        self.deep_says = ("True", 4, "dcgm_diag nccl_allreduce")
        # What the API server does not take: a quota, a policy.
        self.refuses: Callable[[Change], bool] = lambda change: False

    # What a fleet sees.

    def world(self, *, blind: str = "") -> FleetSnapshot:
        status = {"updateRevision": self.revision}
        sets = [
            {"metadata": {"name": name}, "spec": {"replicas": count}, "status": status}
            for name, count in (self.sets or {}).items()
        ]
        controller = {
            "metadata": {
                "name": "slurm-controller-0",
                "uid": self.controller.uid,
                "labels": {"app.kubernetes.io/component": "controller"},
            },
            "spec": {"nodeName": self.controller.node},
        }
        here = kubernetes(
            map(self._node, self.nodes), [*map(self._pod, self.pods), controller], None if self.sets is None else sets
        )
        if self.machines is not None:
            here = replace(here, machines={name: self.machine(name) for name in self.machines})
        if blind == "machines":
            here = replace(here, machines=None, machines_unknown=True)
        jobs = [
            {"job_id": job, "job_state": ["SUSPENDED" if job in node.suspended else "RUNNING"], "nodes": name}
            for name, node in self.slurm.items()
            for job in sorted(node.jobs)
        ]
        wait = [{"job_id": 9, "job_state": ["PENDING"], "required_nodes": name} for name in sorted(self.pending)]
        there = parse_slurm([self._slurm(name) for name in self.slurm], [*jobs, *wait], [])
        silent = blind == "slurm" or self.nodes[self.controller.node].dead
        return FleetSnapshot(
            Unknown("no answer") if blind == "kubernetes" else here,
            Unknown("no answer") if silent else there,
            {name: self.proof(name) for name, node in self.nodes.items() if not node.ready},
        )

    def machine(self, name: str) -> MachineObject:
        kept = (self.machines or {})[name]
        metadata = {"name": name, "uid": kept.uid, "resourceVersion": str(kept.version), "generation": kept.generation}
        return parse_machine({"metadata": metadata, "spec": kept.spec, "status": kept.status})

    def status(self, node: str) -> MachineStatus:
        """Return the status of the machine on this Node."""
        (found,) = [name for name in self.machines or {} if self.machine(name).status.node == node]
        return self.machine(found).status

    def proof(self, name: str) -> DeathProof:
        node = self.nodes[name]
        reached = not (node.dead or self.cut_off)
        pods = tuple(pod for pod, one in self.pods.items() if one.node == name and reached)
        well = any(one.ready and not one.dead for one in self.nodes.values())
        return DeathProof(self.now - node.since, reached, pods, well and not self.cut_off)

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
                "labels": dict(node.labels),
            },
            "spec": {
                "unschedulable": node.cordoned,
                "providerID": node.provider,
                "taints": [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in node.taints.items()],
            },
            "status": {
                "nodeInfo": {"bootID": f"{name}-{node.boot}"},
                "conditions": [
                    ready,
                    *({"type": type_, "status": said, "message": node.said} for type_, said in node.signs.items()),
                    *_shown(node.condition),
                ],
            },
        }

    def _pod(self, name: str) -> dict[str, Any]:
        pod = self.pods[name]
        ready = {"type": "Ready", "status": str(pod.ready), "lastTransitionTime": stamp(BEGIN)}
        told = [{"type": "minivm.io/Gpus", "status": "True", "message": " ".join(pod.gpus)}] if pod.gpus else []
        if pod.deep is not None:
            told.append({"type": "minivm.io/DeepCheck", "status": pod.deep[0], "message": pod.deep[1]})
        told += [{"type": type_, "status": on, "message": said} for type_, (on, said) in pod.states.items()]
        conditions = [ready, *told, *_shown(pod.condition)]
        return {
            "metadata": {
                **({"deletionTimestamp": "2026-11-22T00:00:00Z"} if pod.leaving else {}),
                "name": name,
                "uid": pod.uid,
                "resourceVersion": str(pod.version),
                "creationTimestamp": stamp(pod.created),
                "labels": {
                    "app.kubernetes.io/component": "worker",
                    "minivm.io/pool": "p",
                    "controller-revision-hash": pod.revision,
                    **({"minivm.io/free": "lost" if pod.lost else "true"} if pod.free else {}),
                },
                "annotations": dict(pod.annotations),
            },
            "spec": {"nodeName": pod.node},
            "status": {"conditions": conditions},
        }

    def _slurm(self, name: str) -> dict[str, Any]:
        node = self.slurm[name]
        return {
            "name": name,
            "state": [*node.states, "DYNAMIC_NORM"],
            "reason": node.reason,
            "comment": node.comment,
            "topology": node.place,
            "address": name,
            "alloc_cpus": len(node.jobs - node.suspended),
            "reason_changed_at": {"set": True, "infinite": False, "number": int(node.since)},
            "slurmd_start_time": {"set": True, "infinite": False, "number": 1},
        }

    # What a fleet does.

    def decide(self, world: FleetSnapshot) -> Decision:
        return decide(world, self.memory, self.now, self.policy)

    def look(self, *, cut: int | None = None, blind: str = "", world: FleetSnapshot | None = None) -> int:
        """Make one pass and return the number of changes; `cut` kills it after that many, memory and all."""
        decision = self.decide(world or self.world(blind=blind))
        if cut is not None:
            self.memory = FleetMemory()
            for change in decision.changes[:cut]:
                self.perform(change)
            return min(cut, len(decision.changes))
        refused = {change_key(change): "it is refused" for change in decision.changes if self.refuses(change)}
        self.memory = decision.memory.after_pass(decision.changes, refused, self.now)
        for change in decision.changes:
            if change_key(change) not in refused:
                self.perform(change)
        return len(decision.changes)

    def look_without(self, side: str) -> list[Change]:
        """Make one pass without an answer of this side. Returns the changes beyond the display of the outage."""
        decision = self.decide(self.world(blind=side))
        self.memory = decision.memory
        for change in decision.changes:
            self.perform(change)
        return [change for change in decision.changes if not isinstance(change, DISPLAY)]

    def perform(self, change: Change) -> None:
        """Perform a change as the adapters do: nothing when the observed object has changed."""
        match change:
            case Remove(name):
                if not self.still(name, change.precondition):
                    return
                assert name not in self.pods, "the record of a pod that is there goes"
                assert self.sets is not None, "or of one that may come"
                assert not self.comes(name), "or of one that comes"
                assert name not in self.pending, "or one that somebody names"
                assert not self.slurm[name].jobs, "or that has a job"
                assert self.slurm[name].drained_by != "person", "or that a person holds"
                del self.slurm[name]
            case Drain() | Undrain() | Forget():
                if not self.still(change.name, change.precondition):
                    return
                node = self.slurm[change.name]
                if isinstance(change, Undrain):
                    at, machine = change.seen, self.nodes[change.seen.node]
                    here = self.pods.get(at.pod)
                    if here is None or (str(here.version), str(machine.version)) != (at.pod_version, at.node_version):
                        return
                    cordoned = machine.cordoned and OURS not in machine.labels
                    assert not cordoned, "jobs come to a Node that is cordoned"
                    assert not machine.taints, "or tainted"
                    assert not self.pods[change.seen.pod].free, "or others may evict its pod"
                self._change_slurm(change, node)
            case Place(name, place, was):
                if name not in self.slurm or self.slurm[name].place != was:
                    return
                assert place != was, "it is there already"
                self.slurm[name].place = place
            case Evict():
                if not (self.still(change.pod, change.precondition) and self._pod_still(change)):
                    return
                pod, node = self.pods[change.pod], self.slurm.get(change.pod, SlurmNode(drained_by="nobody"))
                assert pod.free, "its PodDisruptionBudget refuses"
                assert not node.jobs, "a pod is deleted while its node runs a job"
                assert node.drained_by, "and never one that may get a job in this moment"
                others = [one for name, one in self.pods.items() if not one.ready and name != change.pod]
                assert len(others) < self.policy.away, "more pods away than may be"
                self.replace(change.pod)
            case RestartSlurmd():
                if not (self.still(change.pod, change.precondition) and self._pod_still(change)):
                    return
                pod = self.pods[change.pod]
                pod.version += 1
                if change.value is None:
                    del pod.annotations[RESTART]
                else:
                    assert pod.annotations.get(RESTART) != change.value, "it was asked before"
                    pod.annotations[RESTART] = change.value
                    if not {change.pod, pod.uid} & (self.deaf | self.dull):
                        self.slurmd_answers(change.pod)
            case Free() | Protect():
                if not self._pod_still(change) or (
                    isinstance(change, Free) and not self.still(change.pod, change.precondition)
                ):
                    return
                pod = self.pods[change.pod]
                if isinstance(change, Free) and change.precondition is not None:
                    node = self.slurm[change.pod]
                    assert node.drained_by, "others may evict a pod that may get a job in this moment"
                    assert not node.jobs, "or has one"
                pod.free, pod.version = isinstance(change, Free), pod.version + 1
                pod.lost = isinstance(change, Free) and change.precondition is None
            case ShowOnPod():
                shown_on = self.pods.get(change.pod)
                if shown_on is not None and shown_on.uid == change.uid:
                    pod = shown_on
                    pod.condition = (change.condition.status, change.condition.reason, change.condition.message)
                    pod.version += 1
            case ShowStates():
                pod = self.pods[change.pod]
                if pod.uid == change.uid:
                    pod.states |= {each.type: (each.status, each.message) for each in change.conditions}
                    pod.states = {type_: said for type_, said in pod.states.items() if type_ not in change.removed}
                    pod.version += 1
            case ShowOnNode() | HideOnNode():
                seen = self.nodes[change.node]
                if seen.uid == change.uid:
                    shown = change.condition if isinstance(change, ShowOnNode) else None
                    seen.condition = (shown.status, shown.reason, shown.message) if shown else None
                    seen.version += 1
            case Make(name):
                assert self.machines is not None, "nobody has asked for it"
                if name in self.machines:
                    return
                self.machines[name] = Kept(f"machine-{name}")
            case Record():
                found = (self.machines or {}).get(change.name)
                if found is None or str(found.version) != change.version:
                    return
                found.status, found.version = machine_status_json(change.status), found.version + 1
            case Annotate() | Withdraw():
                seen = self.nodes[change.node]
                if (seen.uid, str(seen.version)) != (change.uid, change.version):
                    return
                if isinstance(change, Annotate):
                    seen.annotations |= dict(change.values)
                    self._treated(change.node, dict(change.values)["minivm.io/remedy"])
                else:
                    assert "minivm.io/remedy" in seen.annotations, "annotations of others are taken away"
                    seen.annotations = {key: said for key, said in seen.annotations.items() if key not in change.names}
                seen.version += 1
            case StartJob() | CallHook():
                # Who is called knows the key, and does nothing twice; nor does the API server make a Job twice.
                known = change.name if isinstance(change, StartJob) else change.key
                if known not in self.jobs:
                    self.jobs.append(known)
                    self._treated(change.node, known)
                if self.left_in_job:
                    self.left_in_job = False
                    raise CutInAJob
                self.perform(Record(change.machine.name, change.machine.version, change.new_status))
            case Fence() | Unfence():
                seen = self.nodes[change.node]
                if (seen.uid, str(seen.version)) != (change.uid, change.version):
                    return
                self._fence(seen, given_up=isinstance(change, Fence))
            case Delete():
                machine = self.nodes[change.node]
                if str(machine.version) != change.node_version:
                    return
                if change.pod == "slurm-controller-0":
                    if self.controller.uid != change.uid:
                        return
                    assert self.controller.node == change.node, "another pod"
                    self.count += 1
                    self.controller = Pod(f"controller-{self.count}", self._other())
                elif change.pod in self.pods and self.pods[change.pod].uid == change.uid:
                    assert self.pods[change.pod].node == change.node, "another pod"
                    self.replace(change.pod, self._other())
                else:
                    return
                assert machine.dead, "a pod that runs is deleted by force"
            case Cordon() | Uncordon():
                seen = self.nodes[change.node]
                if (seen.uid, str(seen.version)) != (change.uid, change.version):
                    return
                seen.cordoned, seen.version = isinstance(change, Cordon), seen.version + 1
                if isinstance(change, Cordon):
                    seen.labels[OURS] = MARK
                else:
                    assert OURS in seen.labels, "a person's cordon is lifted"
                    del seen.labels[OURS]
        self.done.append(change)

    def comes(self, name: str) -> bool:
        return int(name.rpartition("-")[2]) < (self.sets or {})["w"]

    def _treated(self, node: str, number: str) -> None:
        """Something is done to a machine, which ends whatever runs there."""
        assert (node, number) not in self.treated, "the same is done twice"
        on = [name for name, pod in self.pods.items() if pod.node == node]
        assert self.nodes[node].cordoned, "it is not kept free"
        for name in on:
            assert self.slurm[name].drained_by, "it may get a job in this moment"
            assert not self.slurm[name].jobs, "it has a job"
        self.treated.append((node, number))
        open_ = [name for name in self.machines or {} if in_treatment(self.machine(name).status.remedy)]
        rules = self.policy.machines
        assert len(open_) <= max(rules.at_once, int(len(self.machines or {}) * rules.share)), "more at once than may be"

    def boots(self, node: str) -> None:
        """Reboot the Node and start its workers anew; no process survives."""
        self.nodes[node].boot += 1
        self.nodes[node].version += 1
        for name in [one for one, pod in self.pods.items() if pod.node == node]:
            self._begins(name)

    def _begins(self, name: str) -> None:
        """Begin a pod on a boot: its node's drain tells it whether to check its machine deeply."""
        node = self.slurm.get(name, SlurmNode())
        if asks_for_deep(Asked(bool(node.drained_by), node.reason, bool(node.jobs))):
            self.checks(name)

    def checks(self, name: str) -> None:
        """Deeply; also because a person asks for it."""
        pod = self.pods[name]
        status, ran, said = self.deep_says
        if status:
            pod.deep = (status, f"{pod.node}-{self.nodes[pod.node].boot} {ran} {said}")
            pod.version += 1

    def still(self, name: str, was: Precondition | None) -> bool:
        node = self.slurm.get(name)
        if node is None or was is None:
            return node is None and was is None
        now = (bool(node.drained_by), node.down, node.reason, node.comment)
        return (was.drained, was.down, was.reason, was.comment) == now

    def _pod_still(self, change: Protect | SlurmGuardedPodChange) -> bool:
        pod = self.pods.get(change.pod)
        return pod is not None and (pod.uid, str(pod.version)) == (change.uid, change.version)

    def _fence(self, seen: Node, *, given_up: bool) -> None:
        if given_up:
            assert seen.dead, "a machine is given up that lives"
            seen.taints[OUT], seen.labels[FENCED] = "nodeshutdown", "true"
            fenced = [one for one in self.nodes.values() if OUT in one.taints and not one.ready]
            assert len(fenced) <= max(1, int(len(self.nodes) * self.policy.share)), "above budget"
        else:
            assert seen.ready, "a machine is taken back that is not there"
            assert FENCED in seen.labels, "another's taint is lifted"
            del seen.taints[OUT], seen.labels[FENCED]
        seen.version += 1

    def _other(self) -> str:
        """Choose a machine for a pod."""
        return next(name for name, node in self.nodes.items() if node.ready and not node.taints)

    def _change_slurm(self, change: Drain | Undrain | Forget, node: SlurmNode) -> None:
        match change:
            case Drain(_, reason, comment, _, down):
                assert node.drained_by != "person", "a person's drain is written over"
                assert (node.down, node.drained_by) != (True, ""), "a node that is down for others is written over"
                if down:
                    assert node.drained_by == "fleet", "only what is drained by us is set down"
                    pod = self.pods.get(change.name)
                    if pod is None and node.responds:
                        assert not node.jobs, "jobs are ended on a pod's absence alone"
                    if "dead" in slurm.causes_in(reason) - slurm.causes_in(node.reason):
                        assert pod is not None and self.nodes[pod.node].dead, "jobs of a machine that lives are ended"
                    node.down, node.down_for = True, pod.uid if pod else "none"
                    self.jobs_end(change.name)  # requeued
                    if self.returns and pod is not None and node.responds:
                        node.down, node.down_for = False, ""
                node.drained_by, node.reason, node.since = "fleet", reason, self.now
            case Undrain(_, comment, _, _, down):
                assert node.drained_by == "fleet", "a drain is lifted that is not the fleet's"
                if down:
                    assert slurm.causes_in(node.reason) & SETS_DOWN, "a node is resumed that is down for others"
                node.drained_by, node.reason, node.since = "", "minivm: fleet: lifted", self.now
                if down:
                    node.down, node.down_for = False, ""
            case Forget():
                comment = ""
        if comment is not None:
            persons = node.comment and not node.comment.startswith("minivm: fleet:")
            assert not persons, "a person's comment is written over"
            node.comment = comment

    # What others do.

    def replace(self, name: str, where: str = "") -> None:
        """Replace the pod by another of its name, which is ready when `settle` says so."""
        self.count += 1
        here = f"n{name.removeprefix('w').removeprefix('-')}"
        node = self.pods[name].node if name in self.pods else here
        self.pods[name] = Pod(f"pod-{name}-{self.count}", where or node, ready=False, created=self.now)
        if name not in self.deaf:
            self.slurm.setdefault(name, SlurmNode())
            self.jobs_end(name)
            self._begins(name)

    def pod_goes(self, name: str) -> None:
        """For good, or for longer: nobody has told Slurm, and its jobs are no more."""
        self.pods.pop(name, None)

    def scale(self, count: int) -> None:
        """Scale the StatefulSet; pods beyond the count go, and Slurm is not informed."""
        self.sets = {"w": count}
        for name in self.names[count:]:
            self.pod_goes(name)
            self.slurmd_goes(name)

    def slurmd_goes(self, name: str) -> None:
        if name in self.slurm:
            self.slurm[name].responds = False

    def person_drains(self, name: str) -> None:
        node = self.slurm[name]
        node.drained_by, node.reason, node.since = "person", "look at fan 3", self.now

    def person_resumes(self, name: str) -> None:
        node = self.slurm[name]
        node.drained_by, node.down, node.down_for = "", False, ""

    def cordon(self, *names: str, on: bool = True) -> None:
        for node in map(self.nodes.__getitem__, names):
            if node.cordoned != on:
                node.cordoned, node.version = on, node.version + 1

    def taint(self, name: str, key: str | None, value: str = "x") -> None:
        node = self.nodes[name]
        fenced = {OUT: node.taints[OUT]} if OUT in node.taints else {}
        node.taints, node.version = {**fenced, **({key: value} if key else {})}, node.version + 1

    def dies(self, name: str, ago: float = 0) -> None:
        """With its kubelet and all that ran on it."""
        self.ready(name, False)
        self.nodes[name].since -= ago
        self.nodes[name].dead = True
        for pod in [one for one, on in self.pods.items() if on.node == name]:
            self.pods[pod].ready = False
            self.slurmd_goes(pod)

    def wants(self, node: str, goal: str, reason: str = "") -> None:
        """Set a user's goal for the existing machine."""
        found = [one for one in self.machines or {} if self.machine(one).status.node == node]
        if not found:
            return
        kept = (self.machines or {})[found[0]]
        spec = {key: said for key, said in (("goal", goal), ("reason", reason)) if said}
        if spec != kept.spec:
            kept.spec, kept.version, kept.generation = spec, kept.version + 1, kept.generation + 1

    def goal(self, node: str) -> str:
        found = (self.machine(name) for name in self.machines or {})
        return next((one.goal for one in found if one.status.node == node), "")

    def verdict(self, name: str, said: str = "gpu_count[rma]@9f2c001 7 of 8 GPUs") -> None:
        """Drain the node as the broker does."""
        node = self.slurm[name]
        node.drained_by, node.reason, node.since = "person", f"minivm: {said}", self.now

    def ready(self, name: str, on: bool = True) -> None:
        node = self.nodes[name]
        node.dead = node.dead and not on
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
        quiet = 0
        for _ in range(most):
            for name in self.names[: (self.sets or {}).get("w")]:
                if name not in self.pods:
                    self.replace(name)
            for name in self.slurm.keys() - self.pods.keys():
                self.slurmd_goes(name)
                self.jobs_end(name)
            for name, pod in self.pods.items():
                self.slurmd_answers(name)
                pod.ready = True
                self.jobs_end(name)
            self.now += 100
            quiet = 0 if self.look() else quiet + 1
            if quiet == 2:
                return
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def slurmd_answers(self, name: str) -> None:
        """Register slurmd: a down node recovers, unless it was set down since its pod exists."""
        node = self.slurm.setdefault(name, SlurmNode())
        node.responds = True
        if node.down_for != self.pods[name].uid:
            node.down, node.down_for = False, ""

    def later(self) -> None:
        self.now += 600

    def settle_in(self, most: int = 10) -> None:
        """Settle the current state."""
        for _ in range(most):
            if not self.look():
                return
        raise AssertionError(f"it never settles: {self.done[-8:]}")

    def end(self) -> object:
        """Return the final state that must not depend on the way there: no times, no counters."""
        return (
            {
                name: (
                    node.cordoned,
                    sorted(node.labels),
                    sorted(node.annotations),
                    sorted(node.taints),
                    node.condition,
                )
                for name, node in self.nodes.items()
            },
            {
                name: (pod.uid.rpartition("-")[2] != "0", pod.condition, pod.free, RESTART in pod.annotations)
                for name, pod in self.pods.items()
            },
            {
                name: (node.drained_by, node.reason if node.drained_by else "", node.comment)
                for name, node in self.slurm.items()
            },
            {name: self._kept(name) for name in self.machines or {}},
        )

    def _kept(self, name: str) -> object:
        status = self.machine(name).status
        return replace(status, history=(), remedy=None), [(one.what, one.text) for one in status.history]
