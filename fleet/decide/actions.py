"""Changes, each with its precondition, and the fleet's memory between passes.

Where the state has changed since it was read, a change does nothing. Losing the memory is safe at any moment: durable
facts are in Slurm and Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.policy import Webhook
from fleet.world.kubernetes import KubeCondition
from fleet.world.machine import MachineObject, MachineStatus
from fleet.world.slurm import Mark, Precondition
from fleet.world.worker_pool import PoolStatus, WorkerPool


@dataclass(frozen=True, slots=True)
class SeenVersions:
    """The versions of a worker's pod and Node that were seen."""

    pod: str
    node: str
    pod_version: str
    node_version: str


@dataclass(frozen=True, slots=True)
class PodChange:
    """A change of a pod, on condition that the pod still has this uid and resourceVersion."""

    pod: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A change of a Node, on condition that the Node still has this uid and resourceVersion."""

    node: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain a node, or change the reason of the fleet's own drain. The same update sets the mark."""

    name: str
    reason: str
    comment: str | None  # None: the comment is a person's and stays
    was: Precondition
    # Set an already drained node down: Slurm ends its jobs and requeues those that may run elsewhere.
    down: bool = False


@dataclass(frozen=True, slots=True)
class Undrain:
    """Lift the fleet's own drain and its mark in one update.

    Resume only what the fleet set down itself; a resume of anything else would lift a person's drain as well.
    """

    name: str
    comment: str | None  # "" removes the mark; None as above
    was: Precondition
    # Jobs start at once, so pod and Node are read again first: a new cause must not be missed.
    at: SeenVersions
    down: bool = False  # the fleet set it down


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the record of a node that will not come back."""

    name: str
    was: Precondition


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the mark: a person has lifted the drain, and its cause has gone since."""

    name: str
    was: Precondition


@dataclass(frozen=True, slots=True)
class Place:
    """Set a node's place in Slurm's topology."""

    name: str
    place: str
    was: str


@dataclass(frozen=True, slots=True)
class Free(PodChange):
    """Label the pod as evictable, provided that its node in Slurm has not changed since it was read."""

    was: Precondition | None  # None: Slurm does not know the node


@dataclass(frozen=True, slots=True)
class Protect(PodChange):
    """Remove that label, since the pod may get a job. Always done before its node is undrained."""


@dataclass(frozen=True, slots=True)
class RestartSlurmd(PodChange):
    """Ask the pod's init by an annotation to restart slurmd, which then registers again. Jobs run on."""

    word: str | None  # the annotation's new value; None: Slurm knows the node again, so remove the annotation
    was: Precondition | None  # None as in `Free`


@dataclass(frozen=True, slots=True)
class Evict(PodChange):
    """Evict exactly this pod by the Eviction API, which respects the pool's PodDisruptionBudget."""

    why: str
    was: Precondition | None  # None as in `Free`


# Changes of a pod whose precondition is the state of its node in Slurm.
ToPod = Free | RestartSlurmd | Evict


@dataclass(frozen=True, slots=True)
class ShowOnPod:
    pod: str
    uid: str
    condition: KubeCondition


@dataclass(frozen=True, slots=True)
class ShowStates:
    """Show several conditions of a pod and remove others in one patch: no reader sees half of the change."""

    pod: str
    uid: str
    conditions: tuple[KubeCondition, ...]
    removed: tuple[str, ...] = ()
    # The pod shows a drain, by which programs may delete it: shown before the states of pods that have none.
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class ShowOnNode:
    node: str
    uid: str
    condition: KubeCondition


@dataclass(frozen=True, slots=True)
class HideOnNode:
    """Remove the condition of a Node without workers."""

    node: str
    uid: str
    type: str


@dataclass(frozen=True, slots=True)
class Cordon(NodeChange):
    """Cordon a Node; the same patch sets the fleet's label."""

    why: str


@dataclass(frozen=True, slots=True)
class Uncordon(NodeChange):
    """Lift the fleet's own cordon, and remove its label."""


@dataclass(frozen=True, slots=True)
class Fence(NodeChange):
    """Give up a dead machine: taint its Node out-of-service; the same patch sets the fleet's label."""

    why: str


@dataclass(frozen=True, slots=True)
class Unfence(NodeChange):
    """Take a machine back: lift the fleet's own out-of-service taint, and remove its label."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a pod without waiting for its dead kubelet, provided that its Node has not changed since it was read."""

    pod: str
    uid: str
    node: str
    node_version: str


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
class Annotate(NodeChange):
    """Request a remedy by the policy's annotations on the Node; the same patch marks which remedy it is."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Withdraw(NodeChange):
    """Remove such annotations."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start a remedy's Job. Its name holds the remedy's number, so a second start is refused."""

    name: str
    node: str
    machine: MachineObject
    goal: str
    why: str
    spec: Mapping[str, object]
    on_node: bool
    after: MachineStatus


@dataclass(frozen=True, slots=True)
class CallHook:
    """Call a remedy's webhook with an idempotency key, and record its answer."""

    name: str
    node: str
    machine: MachineObject
    goal: str
    why: str
    hook: Webhook
    pool: str
    key: str
    after: MachineStatus


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


@dataclass(frozen=True, slots=True)
class NotePool:
    """Write a pool's status onto the version that was seen."""

    name: str
    version: str
    status: PoolStatus


@dataclass(frozen=True, slots=True)
class Notice:
    """Message for operators: why the fleet does not do something, or what an operator should do."""

    about: str
    kind: str
    text: str


Change = (
    Drain | Undrain | Remove | Forget | Free | Protect | Evict | ShowOnPod | ShowStates | ShowOnNode | HideOnNode
    | Cordon | Uncordon
    | RestartSlurmd | Fence | Unfence | Delete | Make | Record
    | Annotate | Withdraw | StartJob | CallHook
    | Place
    | CreatePod | Adopt | NotePool
)  # fmt: skip
Action = Change | Notice
Key = tuple[str, str]


def about(change: object) -> str:
    """Return the name of the object that a change changes."""
    return str(getattr(change, "name", "") or getattr(change, "pod", "") or getattr(change, "node", ""))


def action_key(change: Change) -> Key:
    """Identify a change over several passes. A pod of another template is another change, with its own retries."""
    template = f" {change.pool.hash}" if isinstance(change, CreatePod) else ""
    return type(change).__name__, about(change) + template


# Seconds between retries of a refused change: the first pause, and the longest.
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
# A pool with this many creations in one pass is no longer limited.
FASTEST = 32


def first_of(names: Sequence[str], most: int = 5, separator: str = " ") -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


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
    # Notices by subject and kind: the same text is reported once.
    reported: Mapping[tuple[str, str], NoticeHistory] = field(default_factory=dict)
    # Since when a node in Slurm has had no pod.
    absent: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, LostPod] = field(default_factory=dict)
    # Marks of nodes whose comment a person uses.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    moved: Mapping[str, PlaceHistory] = field(default_factory=dict)
    # Failed changes that are still due.
    refused: Mapping[Key, RefusedChange] = field(default_factory=dict)
    # Since when a waiting job has had as many idle nodes as it needs.
    idle_nodes_since: Mapping[str, float] = field(default_factory=dict)
    # The limit of a pool's creations in one pass, after the API server refused a pod of it.
    paces: Mapping[str, int] = field(default_factory=dict)
    # When slurmctld last answered, by the fleet's clock; 0: it answers.
    slurm_silent_since: float = 0.0

    def tried(self, changes: Iterable[Change], refused: Mapping[Key, str], now: float) -> FleetMemory:
        """Remember the outcome of a pass. `refused`: the changes that failed, and why."""
        tried = tuple(changes)
        keys = {action_key(change) for change in tried}
        refusals = {key: refusal for key, refusal in self.refused.items() if key not in keys}
        for key, text in refused.items():
            times = self.refused[key].times if key in self.refused else 0
            refusals[key] = RefusedChange(times + 1, text, now + backoff(RETRY_S, times, LONGEST_RETRY_S))
        return replace(self, refused=refusals, paces=self._paces(tried, refused))

    def _paces(self, tried: Iterable[Change], refused: Mapping[Key, str]) -> Mapping[str, int]:
        """After a refusal create one pod at a time, since a quota refuses the next too; double after each success."""
        paces = dict(self.paces)
        created = [change for change in tried if isinstance(change, CreatePod)]
        for name in {change.pool.name for change in created}:
            if any(change.pool.name == name and action_key(change) in refused for change in created):
                paces[name] = 1
            elif name in paces and paces[name] < FASTEST:
                paces[name] *= 2
            else:
                paces.pop(name, None)
        return paces
