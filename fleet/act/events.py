"""What was done and what is told, as Events of the pod or Node that it is about: `kubectl describe` shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fleet import crd, crd_pools
from fleet.act.kubernetes import Object
from fleet.act.words import in_words
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
    Protect,
    Record,
    Remove,
    RestartSlurmd,
    ShowOnNode,
    ShowOnPod,
    StartJob,
    Tell,
    Uncordon,
    Undrain,
    Unfence,
    Withdraw,
)
from fleet.topology.place import Place
from fleet.world.kubernetes import Kubernetes, Pod

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
}


def events(actions: Iterable[Change | Tell], world: Kubernetes, namespace: str, most: int) -> list[Object]:
    """`most` at a time; the log has them all."""
    found = (event(action, world, namespace) for action in actions)
    return [one for one in found if one is not None][:most]


def _own(name: str, world: Kubernetes) -> Pod | None:
    """What is told of the whole stands with one of the fleet's own pods."""
    mine = (pod for _, pod in sorted(world.others.items()) if pod.component == FLEET)
    return next(mine, None) if name == FLEET else None


def _whose(record: str, world: Kubernetes) -> str:
    """Its pod is gone: it is told with the pool that made it, and where a StatefulSet did with the fleet."""
    pools = [name for name in world.pools or {} if record.startswith(f"{name}-")]
    return max(pools, key=len, default=FLEET)


def event(action: Change | Tell, world: Kubernetes, namespace: str) -> Object | None:
    """None: of nothing that is there, or no news: a condition of the pod says by itself what it says."""
    match action:
        case (
            ShowOnPod() | ShowOnNode() | HideOnNode() | Free() | Protect() | Forget() | Make() | Record()
            | NotePool()
        ):  # fmt: skip
            return None
        case Tell(about, kind):
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
        own = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd_pools.KIND}
        of = {**own, "name": name, "uid": pool.uid, "namespace": namespace}
    else:
        return None
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "metadata": {"generateName": "fleet-", "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", **of},
        "reason": reason,
        "message": text[:MOST],
        "type": type_,
        "source": {"component": "fleet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
