"""A machine as it is kept: what people want of it, and what the fleet has seen of it and done to it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fleet import crd
from fleet.errors import FleetError
from fleet.world import fields
from fleet.world.fields import Object


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    at: int
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Begun: it is written down before anything is done, so that whoever goes on knows of it."""

    goal: str
    number: int
    at: int
    boot: str = ""  # the machine's boot id before it
    done: bool = False


@dataclass(frozen=True, slots=True)
class MachineStatus:
    goal: str = "up"
    state: str = "Absent"
    why: str = ""
    node: str = ""
    node_uid: str = ""
    boot: str = ""  # of that Node, when it was last seen
    provider: str = ""
    gpus: tuple[str, ...] = ()
    worker: str = ""
    verdict: str = ""
    ill: bool = False
    repeats: int = 0
    history: tuple[HistoryEntry, ...] = ()
    remedy: Remedy | None = None
    remedies: int = 0
    fulfilled: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    uid: str
    version: str
    generation: int = 0  # counts changes of what people want
    goal: str = ""  # "": nobody has said one
    reason: str = ""
    deleting: bool = False
    status: MachineStatus = MachineStatus()


def machine(item: Object) -> Machine:
    metadata = fields.mapping(item.get("metadata"), "metadata")
    spec = fields.mapping(item.get("spec"), "spec")
    goal = fields.text(spec.get("goal"), "spec.goal")
    if goal not in ("", *crd.GOALS):
        raise FleetError("read spec.goal", f"{goal[:40]!r} is not one of {', '.join(crd.GOALS)}")
    return Machine(
        name=fields.text(metadata.get("name"), "metadata.name", needed=True),
        uid=fields.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=fields.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        generation=fields.number(metadata.get("generation"), "metadata.generation"),
        goal=goal,
        reason=fields.text(spec.get("reason"), "spec.reason"),
        deleting=metadata.get("deletionTimestamp") is not None,
        status=_status(fields.mapping(item.get("status"), "status")),
    )


def _status(said: Object) -> MachineStatus:
    def text(key: str) -> str:
        return fields.text(said.get(key), f"status.{key}")

    usual = MachineStatus()
    gpus = (fields.text(one, "status.gpus", needed=True) for one in fields.items(said.get("gpus"), "status.gpus"))
    remedy = fields.mapping(said.get("remedy"), "status.remedy")
    return MachineStatus(
        goal=text("goal") or usual.goal,
        state=text("state") or usual.state,
        why=text("why"),
        node=text("node"),
        node_uid=text("nodeUid"),
        boot=text("boot"),
        provider=text("providerId"),
        gpus=tuple(gpus),
        worker=text("worker"),
        verdict=text("verdict"),
        ill=fields.flag(said.get("ill"), "status.ill"),
        repeats=fields.number(said.get("repeats"), "status.repeats"),
        history=tuple(_event(one) for one in fields.items(said.get("history"), "status.history")),
        remedy=_remedy(remedy) if remedy else None,
        remedies=fields.number(said.get("remedies"), "status.remedies"),
        fulfilled=fields.number(said.get("fulfilled"), "status.fulfilled"),
    )


def _event(item: object) -> HistoryEntry:
    one = fields.mapping(item, "status.history")
    return HistoryEntry(
        int(fields.moment(one.get("at"), "status.history.at")),
        fields.text(one.get("what"), "status.history.what", needed=True),
        fields.text(one.get("text"), "status.history.text"),
    )


def _remedy(one: Object) -> Remedy:
    return Remedy(
        goal=fields.text(one.get("goal"), "status.remedy.goal", needed=True),
        number=fields.number(one.get("number"), "status.remedy.number"),
        at=int(fields.moment(one.get("at"), "status.remedy.at")),
        boot=fields.text(one.get("boot"), "status.remedy.boot"),
        done=fields.flag(one.get("done"), "status.remedy.done"),
    )


def written(status: MachineStatus) -> dict[str, object]:
    """As the API server keeps it. What is empty is left out: applied anew, it goes."""
    said: dict[str, object] = {
        "goal": status.goal,
        "state": status.state,
        "why": status.why,
        "node": status.node,
        "nodeUid": status.node_uid,
        "boot": status.boot,
        "providerId": status.provider,
        "gpus": list(status.gpus),
        "worker": status.worker,
        "verdict": status.verdict,
        "ill": status.ill,
        "repeats": status.repeats,
        "history": [_without({"at": stamp(one.at), "what": one.what, "text": one.text}) for one in status.history],
        "remedies": status.remedies,
        "fulfilled": status.fulfilled,
    }
    if one := status.remedy:
        kept = {"goal": one.goal, "number": one.number, "boot": one.boot, "done": one.done, "at": stamp(one.at)}
        said["remedy"] = _without(kept)
    return _without(said)


def _without(said: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in said.items() if value not in ("", [], None)}


def stamp(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
