"""What was done, noted and told, as Events of the object that it is about: `kubectl describe` shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fleet import crd, crd_pools
from fleet.act.api_client import Object
from fleet.decide.actions import (
    Adopt,
    Annotate,
    CallHook,
    Change,
    Cordon,
    CreatePod,
    Delete,
    Drain,
    Evict,
    Fence,
    Forget,
    Free,
    HideOnNode,
    Make,
    NotePool,
    Notice,
    Protect,
    Record,
    Remove,
    RestartSlurmd,
    ShowOnNode,
    ShowOnPod,
    StartJob,
    Uncordon,
    Undrain,
    Unfence,
    Withdraw,
)
from fleet.decide.decide import MINUTE_S, NEWS
from fleet.decide.topology import Place
from fleet.report.messages import in_words
from fleet.world.kubernetes import Kubernetes, Pod
from fleet.world.machine import HistoryEntry, MachineStatus
from fleet.world.worker_pool import PoolCondition, PoolStatus
from ground.errors import one_line


def lines(before: MachineStatus, after: MachineStatus) -> tuple[HistoryEntry, ...]:
    """Of its history, of which the oldest go."""
    old, now = before.history, after.history
    gone = next(many for many in range(len(old) + 1) if old[many:] == now[: len(old) - many])
    return now[len(old) - gone :]


def turned(before: PoolStatus, after: PoolStatus) -> tuple[PoolCondition, ...]:
    """Conditions that say something else than they did. One that is new and good was never otherwise."""
    old = {one.type: (one.status, one.reason) for one in before.conditions}
    new = (one for one in after.conditions if old.get(one.type) != (one.status, one.reason))
    return tuple(one for one in new if one.type in old or one.status != "True")


def of_machine(before: MachineStatus, after: MachineStatus) -> str:
    return "; ".join(f"{one.what} {one.text}".rstrip() for one in lines(before, after))


def of_pool(before: PoolStatus, after: PoolStatus) -> str:
    said = (f"{one.type} is {one.status}, {one.reason}: {one.message}" for one in turned(before, after))
    return "; ".join(one.removesuffix(": ") for one in said)


class EventRateLimit:
    """A verdict that comes and goes, as root on a worker may have it, is not an Event each time: of one object so many
    are written in a minute. Its status has what is so."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[float, int]] = {}

    def may(self, uid: str, now: float) -> bool:
        since, times = self._written.get(uid, (now, 0))
        if now - since >= MINUTE_S:
            since, times = now, 0
        if times >= NEWS:
            return False
        self._written = {one: kept for one, kept in self._written.items() if now - kept[0] < MINUTE_S}
        self._written[uid] = since, times + 1
        return True


# The API server's own bound.
MOST = 1024
# About the whole; and the component of its own pods.
FLEET = "fleet"
REASONS = {
    Drain: "Drained",
    Undrain: "Undrained",
    Evict: "Evicted",
    Cordon: "Cordoned",
    Uncordon: "Uncordoned",
    Fence: "GivenUp",
    Unfence: "TakenBack",
    Delete: "Deleted",
    Annotate: "RemedyAsked",
    Withdraw: "RemedyWithdrawn",
    StartJob: "RemedyStarted",
    CallHook: "RemedyAsked",
    Adopt: "Adopted",
    RestartSlurmd: "SlurmdRestart",
    CreatePod: "Created",
    Remove: "RecordRemoved",
    Place: "Placed",
    Record: "Noted",
    NotePool: "Noted",
}


def events(
    actions: Iterable[Change | Notice], world: Kubernetes, namespace: str, most: int, often: EventRateLimit, now: float
) -> list[Object]:
    """`most` at a time; the log has them all. What is done and told comes before what is noted of thousands at once."""
    ordered = sorted(actions, key=lambda action: isinstance(action, Record | NotePool))
    found: list[Object] = []
    for action in ordered:
        one = event(action, world, namespace) if len(found) < most else None
        if one is None:
            continue
        if not isinstance(action, Record | NotePool) or often.may(one["involvedObject"]["uid"], now):
            found.append(one)
    return found


def _noted(note: Record | NotePool, world: Kubernetes) -> tuple[Object, str] | None:
    """Of what, and what is new of it since it was seen: a note that repeats what stands, or only counts, is none."""
    if isinstance(note, Record):
        machine = (world.machines or {}).get(note.name)
        said = of_machine(machine.status, note.status) if machine else ""
        return (_own_kind(crd.KIND, note.name, machine.uid), said) if machine and said else None
    pool = (world.pools or {}).get(note.name)
    said = of_pool(pool.status, note.status) if pool else ""
    return (_own_kind(crd_pools.KIND, note.name, pool.uid), said) if pool and said else None


def _own_kind(kind: str, name: str, uid: str) -> Object:
    return {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": kind, "name": name, "uid": uid}


def _own(name: str, world: Kubernetes) -> Pod | None:
    """What is told of the whole stands with one of the fleet's own pods."""
    mine = (pod for _, pod in sorted(world.others.items()) if pod.component == FLEET)
    return next(mine, None) if name == FLEET else None


def _whose(record: str, world: Kubernetes) -> str:
    """Its pod is gone: it is told with the pool that made it, and where a StatefulSet did with the fleet."""
    pools = [name for name in world.pools or {} if record.startswith(f"{name}-")]
    return max(pools, key=len, default=FLEET)


def event(action: Change | Notice, world: Kubernetes, namespace: str) -> Object | None:
    """None: of nothing that is there, or no news: a condition of the pod says by itself what it says."""
    match action:
        case (
            ShowOnPod() | ShowOnNode() | HideOnNode() | Free() | Protect() | Forget() | Make()
        ):  # fmt: skip
            return None
        case Record() | NotePool():
            if (new := _noted(action, world)) is None:
                return None
            return _written({**new[0], "namespace": namespace}, namespace, REASONS[type(action)], "Normal", new[1])
        case Notice(about, kind):
            name, reason, type_, text = about, kind.capitalize(), "Warning", in_words(action)
        case (
            Drain(name) | Undrain(name) | Evict(name) | Delete(name) | Adopt(name)
            | RestartSlurmd(name) | Annotate(name) | Withdraw(name) | StartJob(_, name) | CallHook(_, name)
            | Place(name) | Cordon(name) | Uncordon(name) | Fence(name) | Unfence(name)
        ):  # fmt: skip
            reason, type_, text = REASONS[type(action)], "Normal", in_words(action)
        case CreatePod(_, _, of_pool):
            name, reason, type_, text = of_pool.name, REASONS[CreatePod], "Normal", in_words(action)
        case Remove(record):
            name, reason, type_, text = _whose(record, world), REASONS[Remove], "Normal", in_words(action)
    if pod := world.pods.get(name) or world.others.get(name) or _own(name, world):
        name = pod.name
        of: Object = {"kind": "Pod", "name": name, "uid": pod.uid, "namespace": namespace}
    elif node := world.nodes.get(name):
        # Its Events stand where those of other Nodes do; a Node has no namespace.
        of, namespace = {"kind": "Node", "name": name, "uid": node.uid}, "default"
    elif pool := (world.pools or {}).get(name):
        of = {**_own_kind(crd_pools.KIND, name, pool.uid), "namespace": namespace}
    else:
        return None
    return _written(of, namespace, reason, type_, text)


def _written(of: Object, namespace: str, reason: str, type_: str, text: str) -> Object:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
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
