"""Changes and notices as sentences, and as Events of the objects that they concern: `kubectl describe` shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fleet import crd
from fleet.act.api_client import Object
from fleet.decide import actions
from fleet.decide.decide import MINUTE_S, MOST_NEWS
from fleet.world.kubernetes import KubePod, KubernetesView
from fleet.world.machine import HistoryEntry, MachineStatus, rfc3339
from fleet.world.worker_pool import PoolCondition, PoolStatus
from ground.errors import one_line

# Changes and notices as sentences for the log, the plan and Events.


def describe_action(action: actions.Action) -> str:
    """Render a change or notice as one printable line."""
    return one_line(_describe(action))


def _describe(action: actions.Action) -> str:
    match action:
        case actions.Drain() | actions.Undrain() | actions.Remove() | actions.Forget() | actions.Place():
            return _describe_in_slurm(action)
        case actions.PodChange() | actions.Delete() | actions.CreatePod():
            return _describe_of_pod(action)
        case actions.NodeChange():
            return _describe_of_node(action)
        case actions.ShowOnPod() | actions.ShowOnNode() | actions.ShowStates() | actions.HideOnNode():
            return _describe_shown(action)
        case actions.Notice(about, _, text):
            return f"{about}: {text}"
        case _:
            return _describe_of_object(action)


def _describe_in_slurm(
    action: actions.Drain | actions.Undrain | actions.Remove | actions.Forget | actions.Place,
) -> str:
    match action:
        case actions.Drain(name, reason, _, _, down):
            return f"{'set down' if down else 'drain'} {name} in Slurm: {reason}"
        case actions.Undrain(name, _, _, _, down):
            return f"{'resume' if down else 'undrain'} {name} in Slurm"
        case actions.Remove(name):
            return f"remove the record of {name} from Slurm: its name does not come back, and nothing refers to it"
        case actions.Forget(name):
            return f"remove the fleet's mark from {name}"
        case actions.Place(name, place):
            switch, *block = (part.rpartition(":")[2] for part in place.split(","))
            return f"place {name} at {switch}{''.join(f', in block {name_},' for name_ in block)} in Slurm"


def _describe_of_pod(action: actions.PodChange | actions.Delete | actions.CreatePod) -> str:
    match action:
        case actions.Evict(pod, _, _, why):
            return f"evict {pod}: {why}"
        case actions.Free(pod):
            return f"allow the eviction of {pod}: it is drained, and nothing holds it"
        case actions.RestartSlurmd(pod, _, _, word):
            return f"restart slurmd of {pod}: Slurm does not know it" if word else f"Slurm knows {pod} again"
        case actions.Protect(pod):
            return f"protect {pod}: it may get a job"
        case actions.Delete(pod, _, node):
            return f"delete {pod} by force: {node} is given up"
        case actions.CreatePod(name, node, pool):
            return f"create {name} of {pool.name}{f' on {node}' if node else ''}: template {pool.hash}"
        case actions.Adopt(pod, _, _, pool):
            return f"adopt {pod} into {pool.name} unchanged"
        case _:
            raise TypeError(f"{type(action).__name__} is no change of a pod")


def _describe_of_node(action: actions.NodeChange) -> str:
    match action:
        case actions.Cordon(node, _, _, why):
            return f"cordon {node}: {why}"
        case actions.Uncordon(node):
            return f"uncordon {node}"
        case actions.Fence(node, _, _, why):
            return f"give up {node} and taint it out-of-service: {why}"
        case actions.Unfence(node):
            return f"take {node} back into service"
        case actions.Annotate(node, _, _, values):
            return f"request a remedy of {node}: {' '.join(f'{key}={value}' for key, value in values)}"
        case actions.Withdraw(node):
            return f"withdraw the request for a remedy of {node}"
        case _:
            raise TypeError(f"{type(action).__name__} is no change of a Node")


def _describe_shown(
    action: actions.ShowOnPod | actions.ShowOnNode | actions.ShowStates | actions.HideOnNode,
) -> str:
    match action:
        case actions.ShowOnPod(name, _, seen) | actions.ShowOnNode(name, _, seen):
            return f"show on {name}: {seen.reason} {seen.message}".rstrip()
        case actions.ShowStates(name, _, states, removed):
            shown = ", ".join(f"{state.type} {state.status}" for state in states)
            return f"show on {name}: {shown}" if states else f"remove from {name}: {', '.join(removed)}"
        case actions.HideOnNode(node):
            return f"remove the condition from {node}: no worker is on it"


def _describe_of_object(
    action: actions.Make | actions.Record | actions.StartJob | actions.CallHook | actions.NotePool,
) -> str:
    match action:
        case actions.Make(name, node):
            return f"create Machine {name} for {node}"
        case actions.Record(name, _, status):
            last = f": {status.history[-1].what} {status.history[-1].text}".rstrip() if status.history else ""
            return f"record Machine {name}: {status.state}{last}"
        case actions.StartJob(name, node, _, goal, why):
            return f"start Job {name} to {goal} {node}: {why}"
        case actions.CallHook(name, node, _, goal, why, hook):
            return f"call {hook.where} for {name} to {goal} {node}: {why}"
        case actions.NotePool(name, _, status):
            return f"record WorkerPool {name}: {status.ready} of {status.wanted} ready, {status.updated} updated"


def find_new_entries(before: MachineStatus, after: MachineStatus) -> tuple[HistoryEntry, ...]:
    """Return the new entries of a machine's history, of which the oldest are dropped."""
    old, now = before.history, after.history
    gone = next(many for many in range(len(old) + 1) if old[many:] == now[: len(old) - many])
    return now[len(old) - gone :]


def find_turned_conditions(before: PoolStatus, after: PoolStatus) -> tuple[PoolCondition, ...]:
    """Return the conditions with a new status or reason. A new condition that is good is no news."""
    old = {condition.type: (condition.status, condition.reason) for condition in before.conditions}
    new = (
        condition for condition in after.conditions if old.get(condition.type) != (condition.status, condition.reason)
    )
    return tuple(condition for condition in new if condition.type in old or condition.status != "True")


def describe_machine_news(before: MachineStatus, after: MachineStatus) -> str:
    return "; ".join(f"{entry.what} {entry.text}".rstrip() for entry in find_new_entries(before, after))


def describe_pool_news(before: PoolStatus, after: PoolStatus) -> str:
    texts = (
        f"{condition.type} is {condition.status}, {condition.reason}: {condition.message}"
        for condition in find_turned_conditions(before, after)
    )
    return "; ".join(text.removesuffix(": ") for text in texts)


class EventRateLimit:
    """Limit Events for notes of one object to MOST_NEWS a minute: root on a worker can make a verdict come and go."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[float, int]] = {}

    def may(self, uid: str, now: float) -> bool:
        since, times = self._written.get(uid, (now, 0))
        if now - since >= MINUTE_S:
            since, times = now, 0
        if times >= MOST_NEWS:
            return False
        self._written = {key: written for key, written in self._written.items() if now - written[0] < MINUTE_S}
        self._written[uid] = since, times + 1
        return True


# The API server's limit of a message.
MOST = 1024
# The subject of notices about the whole fleet, and the component of the fleet's own pods.
FLEET = "fleet"
# The reasons of changes' Events; other changes show themselves, such as a condition.
REASONS: dict[type[actions.Action], str] = {
    actions.Drain: "Drained",
    actions.Undrain: "Undrained",
    actions.Evict: "Evicted",
    actions.Cordon: "Cordoned",
    actions.Uncordon: "Uncordoned",
    actions.Fence: "GivenUp",
    actions.Unfence: "TakenBack",
    actions.Delete: "Deleted",
    actions.Annotate: "RemedyAsked",
    actions.Withdraw: "RemedyWithdrawn",
    actions.StartJob: "RemedyStarted",
    actions.CallHook: "RemedyAsked",
    actions.Adopt: "Adopted",
    actions.RestartSlurmd: "SlurmdRestart",
    actions.CreatePod: "Created",
    actions.Remove: "RecordRemoved",
    actions.Place: "Placed",
    actions.Record: "Noted",
    actions.NotePool: "Noted",
}


def events(
    items: Iterable[actions.Action],
    kubernetes: KubernetesView,
    namespace: str,
    most: int,
    limit: EventRateLimit,
    now: float,
) -> list[Object]:
    """Build at most `most` Events; the log has all. Notes come last, since there may be thousands."""
    ordered = sorted(items, key=lambda action: isinstance(action, actions.Record | actions.NotePool))
    objects: list[Object] = []
    for action in ordered:
        item = event(action, kubernetes, namespace) if len(objects) < most else None
        if item is None:
            continue
        if not isinstance(action, actions.Record | actions.NotePool) or limit.may(item["involvedObject"]["uid"], now):
            objects.append(item)
    return objects


def _noted(note: actions.Record | actions.NotePool, kubernetes: KubernetesView) -> tuple[Object, str] | None:
    """Return the object of a note, and its news; None: the note has no news, or only counts."""
    if isinstance(note, actions.Record):
        machine = (kubernetes.machines or {}).get(note.name)
        news = describe_machine_news(machine.status, note.status) if machine else ""
        return (_own_kind(crd.KIND, note.name, machine.uid), news) if machine and news else None
    pool = (kubernetes.pools or {}).get(note.name)
    news = describe_pool_news(pool.status, note.status) if pool else ""
    return (_own_kind(crd.POOL_KIND, note.name, pool.uid), news) if pool and news else None


def _own_kind(kind: str, name: str, uid: str) -> Object:
    return {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": kind, "name": name, "uid": uid}


def _own(name: str, kubernetes: KubernetesView) -> KubePod | None:
    """Return one of the fleet's own pods, for notices about the whole fleet."""
    own = (pod for _, pod in sorted(kubernetes.others.items()) if pod.component == FLEET)
    return next(own, None) if name == FLEET else None


def _whose(record: str, kubernetes: KubernetesView) -> str:
    """Return the object for the Event of a removed record, which has no pod: its WorkerPool, else the fleet."""
    pools = [name for name in kubernetes.pools or {} if record.startswith(f"{name}-")]
    return max(pools, key=len, default=FLEET)


def event(action: actions.Action, kubernetes: KubernetesView, namespace: str) -> Object | None:
    """Build an Event; None: its object does not exist, or it is no news, such as a condition that shows itself."""
    reason, type_ = REASONS.get(type(action), ""), "Normal"
    match action:
        case actions.Record() | actions.NotePool():
            if (news := _noted(action, kubernetes)) is None:
                return None
            return _written({**news[0], "namespace": namespace}, namespace, reason, type_, news[1])
        case actions.Notice(name, kind):
            reason, type_ = kind.capitalize(), "Warning"
        case actions.StartJob(_, name) | actions.CallHook(_, name):
            pass  # the Event is on the Node, not on the Job
        case actions.CreatePod(_, _, pool_of_pod):
            name = pool_of_pod.name
        case actions.Remove(record):
            name = _whose(record, kubernetes)
        case _:
            name = actions.object_name(action)
    if not reason:
        return None
    if pod := kubernetes.pods.get(name) or kubernetes.others.get(name) or _own(name, kubernetes):
        name = pod.name
        of: Object = {"kind": "Pod", "name": name, "uid": pod.uid, "namespace": namespace}
    elif node := kubernetes.nodes.get(name):
        # Events of Nodes, which have no namespace, are in `default`.
        of, namespace = {"kind": "Node", "name": name, "uid": node.uid}, "default"
    elif pool := (kubernetes.pools or {}).get(name):
        of = {**_own_kind(crd.POOL_KIND, name, pool.uid), "namespace": namespace}
    else:
        return None
    return _written(of, namespace, reason, type_, describe_action(action))


def _written(of: Object, namespace: str, reason: str, type_: str, text: str) -> Object:
    now = rfc3339(time.time())
    return {
        "metadata": {"generateName": "fleet-", "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", **of},
        "reason": reason,
        "message": one_line(text)[:MOST],
        "type": type_,
        "source": {"component": "fleet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
