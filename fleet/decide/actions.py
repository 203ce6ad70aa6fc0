"""The changes that the fleet can decide, and what it remembers between passes. Pure data.

`decide` returns changes; the reconciler applies each by `slurm_client` or `changes` (fleet/act), and fleet/report shows
them. The world may change between the reading and the change, so each change carries its precondition: the uid and
version of an object, or the state of a node in Slurm. If the precondition no longer holds, the change does nothing, and
the next pass decides anew.

A change's class name is a label of the fleet's metrics, and part of its key (`change_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.policy import Webhook
from fleet.world.kubernetes import KubeCondition
from fleet.world.machine import MachineObject, MachineStatus
from fleet.world.slurm import Mark, Precondition
from fleet.world.worker_pool import PoolStatus, WorkerPool

# Nodes in Slurm.


@dataclass(frozen=True, slots=True)
class SeenVersions:
    """The versions of a worker's pod and Node on which a decision is based."""

    pod: str
    node: str
    pod_version: str
    node_version: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain a node, or change the reason of the fleet's own drain. The same update sets the fleet's mark."""

    name: str
    reason: str
    comment: str | None  # the node's comment with the mark; None: a person uses the comment, so leave it alone
    precondition: Precondition
    # Set an already drained node down: Slurm ends its jobs and requeues those that may run elsewhere.
    down: bool = False


@dataclass(frozen=True, slots=True)
class Undrain:
    """Lift the fleet's own drain and its mark in one update.

    Resume only what the fleet set down itself; a resume of anything else would lift a person's drain as well.
    """

    name: str
    comment: str | None  # "" removes the mark; None as in `Drain`
    precondition: Precondition
    # Jobs start at once, so pod and Node are read again first: a new cause must not be missed.
    seen: SeenVersions
    down: bool = False  # the fleet set the node down


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the record of a node that will not come back."""

    name: str
    precondition: Precondition


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the fleet's mark from a node: a person lifted the drain, and its cause has ended since."""

    name: str
    precondition: Precondition


@dataclass(frozen=True, slots=True)
class Place:
    """Set a node's place in Slurm's topology, if it still has the old one."""

    name: str
    place: str
    old_place: str


# Pods.


@dataclass(frozen=True, slots=True)
class PodChange:
    """A change of a pod, on condition that the pod still has this uid and resourceVersion."""

    pod: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Free(PodChange):
    """Label the pod as evictable, provided that its node in Slurm has not changed since it was read."""

    precondition: Precondition | None  # None: Slurm does not know the node


@dataclass(frozen=True, slots=True)
class Protect(PodChange):
    """Remove the label of `Free`, since the pod may get a job. Always done before its node is undrained."""


@dataclass(frozen=True, slots=True)
class RestartSlurmd(PodChange):
    """Ask the pod's init by an annotation to restart slurmd, which then registers again. Jobs run on."""

    value: str | None  # of the annotation; None: Slurm knows the node again, so remove the annotation
    precondition: Precondition | None  # None as in `Free`


@dataclass(frozen=True, slots=True)
class Evict(PodChange):
    """Evict exactly this pod by the Eviction API, which respects the pool's PodDisruptionBudget."""

    reason: str
    precondition: Precondition | None  # None as in `Free`


# Changes of a pod that also require that its node in Slurm has not changed.
SlurmGuardedPodChange = Free | RestartSlurmd | Evict


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a pod without waiting for its dead kubelet, provided that its Node has not changed since it was read."""

    pod: str
    uid: str
    node: str
    node_version: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod of a pool. Its name is fixed, so a second creation is refused."""

    name: str
    node: str  # "": the scheduler chooses
    pool: WorkerPool


@dataclass(frozen=True, slots=True)
class Adopt(PodChange):
    """Make a pool the owner of an ownerless pod with its name and label."""

    pool: WorkerPool


# States of Slurm, shown as conditions of pods and Nodes.


@dataclass(frozen=True, slots=True)
class ShowOnPod:
    """Write one condition of a pod."""

    pod: str
    uid: str
    condition: KubeCondition


@dataclass(frozen=True, slots=True)
class ShowStates:
    """Write several conditions of a pod and remove others in one patch: no reader sees half of the change."""

    pod: str
    uid: str
    conditions: tuple[KubeCondition, ...]
    removed: tuple[str, ...] = ()
    # The pod shows a drain, by which programs may delete it: shown before the states of pods that have none.
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class ShowOnNode:
    """Write the condition of a Node with the states of its workers."""

    node: str
    uid: str
    condition: KubeCondition


@dataclass(frozen=True, slots=True)
class HideOnNode:
    """Remove the condition of a Node without workers."""

    node: str
    uid: str
    type: str


# Kubernetes' Nodes.


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A change of a Node, on condition that the Node still has this uid and resourceVersion."""

    node: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Cordon(NodeChange):
    """Cordon a Node; the same patch sets the fleet's label."""

    reason: str


@dataclass(frozen=True, slots=True)
class Uncordon(NodeChange):
    """Lift the fleet's own cordon, and remove its label."""


@dataclass(frozen=True, slots=True)
class Fence(NodeChange):
    """Give up a dead machine: taint its Node out-of-service; the same patch sets the fleet's label."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unfence(NodeChange):
    """Take a machine back: lift the fleet's own out-of-service taint, and remove its label."""


@dataclass(frozen=True, slots=True)
class Annotate(NodeChange):
    """Request a remedy by the policy's annotations on the Node; the same patch marks which remedy it is."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Withdraw(NodeChange):
    """Remove the annotations of a remedy that `Annotate` requested."""

    names: tuple[str, ...]


# Machine and WorkerPool objects.


@dataclass(frozen=True, slots=True)
class Make:
    """Create a Machine object. Its name follows from the hardware, so a second creation is refused."""

    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Record:
    """Write a Machine's status onto the version that was seen."""

    name: str
    version: str
    status: MachineStatus


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start a remedy's Job. Its name holds the remedy's number, so a second start is refused."""

    name: str
    node: str
    machine: MachineObject
    goal: str
    reason: str
    spec: Mapping[str, object]
    on_node: bool
    new_status: MachineStatus  # recorded once the Job is started


@dataclass(frozen=True, slots=True)
class CallHook:
    """Call a remedy's webhook with an idempotency key, and record its answer."""

    name: str
    node: str
    machine: MachineObject
    goal: str
    reason: str
    hook: Webhook
    pool: str
    key: str
    new_status: MachineStatus  # recorded once the webhook has answered


@dataclass(frozen=True, slots=True)
class NotePool:
    """Write a pool's status onto the version that was seen."""

    name: str
    version: str
    status: PoolStatus


@dataclass(frozen=True, slots=True)
class Notice:
    """Message for operators, which changes nothing: why the fleet does not act, or what an operator should do."""

    about: str
    kind: str
    text: str


Change = (
    Drain | Undrain | Remove | Forget | Place
    | Free | Protect | RestartSlurmd | Evict | Delete | CreatePod | Adopt
    | ShowOnPod | ShowStates | ShowOnNode | HideOnNode
    | Cordon | Uncordon | Fence | Unfence | Annotate | Withdraw
    | Make | Record | StartJob | CallHook | NotePool
)  # fmt: skip
Action = Change | Notice
# Identifies a change over several passes: the name of its class, and the name of its object.
ChangeKey = tuple[str, str]


def object_name(change: object) -> str:
    """Return the name of the object that a change changes."""
    return str(getattr(change, "name", "") or getattr(change, "pod", "") or getattr(change, "node", ""))


def change_key(change: Change) -> ChangeKey:
    """Identify a change over several passes. A pod of another template is another change, with its own retries."""
    template = f" {change.pool.hash}" if isinstance(change, CreatePod) else ""
    return type(change).__name__, object_name(change) + template


def first_of(names: Sequence[str], most: int = 5, separator: str = " ") -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


# The memory between passes. The fleet may lose it at any moment: all durable facts are in Slurm and Kubernetes.

# Seconds between retries of a refused change: the first pause, and the longest.
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
# A pool whose limit of creations in one pass has grown to this number is no longer limited.
MOST_CREATIONS = 32


def backoff(first_s: float, times: int, longest_s: float) -> float:
    """Return the pause after `times` earlier failures: it doubles each time."""
    return min(longest_s, first_s * 2.0 ** min(times, 60))


@dataclass(frozen=True, slots=True)
class LostPod:
    """A pod that Slurm does not know: since when, and how often it was replaced."""

    since: float
    times: int = 0


@dataclass(frozen=True, slots=True)
class NoticeHistory:
    """The texts about one subject that were reported, and how many of them in the present minute."""

    texts: frozenset[str] = frozenset()
    since: float = 0.0  # start of the minute in which new texts are counted
    times: int = 0


@dataclass(frozen=True, slots=True)
class RefusedChange:
    """A change that failed: how often, why, and when it may be tried again."""

    times: int
    text: str
    until: float


@dataclass(frozen=True, slots=True)
class PlaceHistory:
    """A node's place in Slurm's topology, and when it changed before."""

    place: str
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """Memory of the fleet between passes, by the name of a node, a pod or a pool."""

    # Notices by subject and kind: the same text is reported once.
    reported: Mapping[tuple[str, str], NoticeHistory] = field(default_factory=dict)
    # Since when a node in Slurm has had no pod.
    absent: Mapping[str, float] = field(default_factory=dict)
    # Pods that Slurm does not know.
    lost: Mapping[str, LostPod] = field(default_factory=dict)
    # Marks of nodes whose comment a person uses.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    # Places of nodes in Slurm's topology.
    moved: Mapping[str, PlaceHistory] = field(default_factory=dict)
    # Failed changes that are still due.
    refused: Mapping[ChangeKey, RefusedChange] = field(default_factory=dict)
    # Since when a waiting job has had as many idle nodes as it needs.
    idle_nodes_since: Mapping[str, float] = field(default_factory=dict)
    # The limit of a pool's creations in one pass, after the API server refused a pod of the pool.
    paces: Mapping[str, int] = field(default_factory=dict)
    # When slurmctld last answered, by the fleet's clock; 0: slurmctld answers.
    slurm_silent_since: float = 0.0

    def after_pass(self, changes: Iterable[Change], refused: Mapping[ChangeKey, str], now: float) -> FleetMemory:
        """Remember the outcome of the changes that a pass tried. `refused`: those that failed, and why."""
        tried = tuple(changes)
        keys = {change_key(change) for change in tried}
        refusals = {key: refusal for key, refusal in self.refused.items() if key not in keys}
        for key, text in refused.items():
            times = self.refused[key].times if key in self.refused else 0
            refusals[key] = RefusedChange(times + 1, text, now + backoff(RETRY_S, times, LONGEST_RETRY_S))
        return replace(self, refused=refusals, paces=self._new_paces(tried, refused))

    def _new_paces(self, tried: Iterable[Change], refused: Mapping[ChangeKey, str]) -> Mapping[str, int]:
        """After a refusal create one pod at a time, since a quota refuses the next too; double after each success."""
        paces = dict(self.paces)
        creations_by_pool: dict[str, list[CreatePod]] = {}
        for change in tried:
            if isinstance(change, CreatePod):
                creations_by_pool.setdefault(change.pool.name, []).append(change)
        for pool, creations in creations_by_pool.items():
            if any(change_key(creation) in refused for creation in creations):
                paces[pool] = 1
            elif paces.get(pool, MOST_CREATIONS) < MOST_CREATIONS:
                paces[pool] *= 2
            else:
                paces.pop(pool, None)
        return paces
