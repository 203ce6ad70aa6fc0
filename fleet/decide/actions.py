"""What may be done, each with what must still be so when it is done: on another world it does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.decide.topology import Place
from fleet.policy import Webhook
from fleet.world.kubernetes import Condition
from fleet.world.machine import Machine, MachineStatus
from fleet.world.slurm import Precondition
from fleet.world.worker_pool import PoolStatus, WorkerPool


@dataclass(frozen=True, slots=True)
class Versions:
    """Of a worker's pod and Node, as they were seen."""

    pod: str
    node: str
    pod_version: str
    node_version: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drains, or says another reason for a drain of ours. The mark is set by the same call, where it has a place."""

    name: str
    reason: str
    comment: str | None  # None: it is somebody else's, and stays
    was: Precondition
    # What is drained by us already is set down: Slurm ends its jobs now, and those that may run elsewhere.
    down: bool = False


@dataclass(frozen=True, slots=True)
class Undrain:
    """Takes back a drain of ours and its mark, by one call. A resume only of what is down by us: of everything else it
    would also lift what is not ours."""

    name: str
    comment: str | None  # "", or None as above
    was: Precondition
    # Jobs come at once: that there is no cause any more is asked anew. What follows late from a cause does no harm.
    at: Versions
    down: bool = False  # by us


@dataclass(frozen=True, slots=True)
class Remove:
    """The record of a name that does not come back."""

    name: str
    was: Precondition


@dataclass(frozen=True, slots=True)
class Forget:
    """The mark goes: somebody has lifted the drain, and its cause is gone too."""

    name: str
    was: Precondition


@dataclass(frozen=True, slots=True)
class Free:
    """Labels the pod: others may evict it too. Only while Slurm says of its node what it said when this was decided."""

    pod: str
    uid: str
    version: str
    was: Precondition | None  # None: it knows no such node


@dataclass(frozen=True, slots=True)
class Protect:
    """Takes that label away: it may get a job. Always before its node is undrained."""

    pod: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class RestartSlurmd:
    """Asks the pod's init for it by an annotation. Jobs run on meanwhile, and it registers anew."""

    pod: str
    uid: str
    version: str
    word: str | None  # None: Slurm knows it again, and the word goes
    was: Precondition | None  # as of `Free`


@dataclass(frozen=True, slots=True)
class Evict:
    """By the API server's own eviction, which keeps the pool's PodDisruptionBudget; of this pod and of no successor."""

    pod: str
    uid: str
    version: str
    why: str
    was: Precondition | None  # as of `Free`: a person may have resumed the node since


# Of a pod, and only while Slurm says of its node what it said then: `was`.
ToPod = Free | RestartSlurmd | Evict


@dataclass(frozen=True, slots=True)
class ShowOnPod:
    pod: str
    uid: str
    condition: Condition


@dataclass(frozen=True, slots=True)
class ShowOnNode:
    node: str
    uid: str
    condition: Condition


@dataclass(frozen=True, slots=True)
class HideOnNode:
    """No worker is on it any more: the condition goes."""

    node: str
    uid: str
    type: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """With our label, by one call: so it is known whose it is."""

    node: str
    uid: str
    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    node: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Taints a dead machine's Node out of service, with our annotation, by one call."""

    node: str
    uid: str
    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Unfence:
    node: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Delete:
    """By force: nobody waits for a kubelet that is no more. Of this pod, and while its Node is as it was seen."""

    pod: str
    uid: str
    node: str
    node_version: str


@dataclass(frozen=True, slots=True)
class Make:
    """A Machine, of a name that says which hardware it is: made twice, it is made once."""

    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Record:
    """A Machine's status, as a whole, onto the version that was seen of it: another object of the name has another."""

    name: str
    version: str
    status: MachineStatus


@dataclass(frozen=True, slots=True)
class Annotate:
    """Asks whoever heeds these annotations of a Node for a remedy; which one it is stands beside them, by one call."""

    node: str
    uid: str
    version: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Takes such annotations away."""

    node: str
    uid: str
    version: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJob:
    """A remedy's Job, of a name with its number: started twice, it is started once. Then it is noted."""

    name: str
    node: str
    machine: Machine
    goal: str
    why: str
    spec: Mapping[str, object]
    on_node: bool
    after: MachineStatus


@dataclass(frozen=True, slots=True)
class CallHook:
    """A remedy's webhook, with a key that is this remedy's alone: called twice, it is asked for once. Its answer is
    noted."""

    name: str
    node: str
    machine: Machine
    goal: str
    why: str
    hook: Webhook
    pool: str
    key: str
    after: MachineStatus


@dataclass(frozen=True, slots=True)
class CreatePod:
    """One of a pool's. Its name is known before it is there: created twice, it is created once."""

    name: str
    node: str  # "": wherever it is placed
    pool: WorkerPool


@dataclass(frozen=True, slots=True)
class Adopt:
    """A pod that nobody makes any more, of a pool's name and label: from now on it is the pool's, as it is."""

    pod: str
    uid: str
    version: str
    pool: WorkerPool


@dataclass(frozen=True, slots=True)
class NotePool:
    """A pool's status, as `Record`."""

    name: str
    version: str
    status: PoolStatus


@dataclass(frozen=True, slots=True)
class Notice:
    """Why something is not done, or what a person should do. `about` names what it is about, once for each kind."""

    about: str
    kind: str
    text: str


Change = (
    Drain | Undrain | Remove | Forget | Free | Protect | Evict | ShowOnPod | ShowOnNode | HideOnNode | Cordon | Uncordon
    | RestartSlurmd | Fence | Unfence | Delete | Make | Record
    | Annotate | Withdraw | StartJob | CallHook
    | Place
    | CreatePod | Adopt | NotePool
)  # fmt: skip
Action = Change | Notice
Key = tuple[str, str]


def about(change: object) -> str:
    """The name of what it changes."""
    return str(getattr(change, "name", "") or getattr(change, "pod", "") or getattr(change, "node", ""))


def action_key(change: Change) -> Key:
    """The same deed, however often it is decided. A pod of another template is another one: what was refused of the one
    says nothing of the other."""
    of = f" {change.pool.hash}" if isinstance(change, CreatePod) else ""
    return type(change).__name__, about(change) + of
