"""The Machine object: the goal that people set, and the status with the fleet's observations and actions.

To add a field to the status, add it to `MachineStatus`, `_parse_status` and `machine_status_json`, its schema to
fleet/crd.py and the chart's copy (`fleet crd` prints it), and its value to fleet/decide/machines.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fleet import crd
from fleet.world.fields import Fields, Object


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    at: int
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ActiveHistory:
    """Last results of one active check on a machine."""

    check: str
    at: int
    passed_at: int = 0  # 0: never
    results: str = ""  # P: passed, F: failed; the latest last


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy in progress. The fleet records it before it performs it, so that the next leader knows of it."""

    goal: str
    number: int
    at: int
    boot: str = ""  # the machine's boot id before the remedy
    done: bool = False


@dataclass(frozen=True, slots=True)
class MachineStatus:
    goal: str = "up"
    state: str = "Absent"
    why: str = ""
    node: str = ""
    node_uid: str = ""
    boot: str = ""  # the Node's boot id when it was last seen
    provider: str = ""
    gpus: tuple[str, ...] = ()
    worker: str = ""
    verdict: str = ""
    ill: bool = False
    repeats: int = 0
    history: tuple[HistoryEntry, ...] = ()
    active_checks: tuple[ActiveHistory, ...] = ()
    remedy: Remedy | None = None
    remedies: int = 0
    fulfilled: int = 0


@dataclass(frozen=True, slots=True)
class MachineObject:
    name: str
    uid: str
    version: str
    generation: int = 0  # changes with the spec
    goal: str = ""  # "": no person has set one
    reason: str = ""
    deleting: bool = False
    status: MachineStatus = MachineStatus()


def parse_machine(item: Object) -> MachineObject:
    fields = Fields(item)
    metadata, spec = fields.sub("metadata"), fields.sub("spec")
    goal = spec.text("goal")
    if goal not in ("", *crd.GOALS):
        spec.fail("goal", f"{goal[:40]!r} is not one of {', '.join(crd.GOALS)}")
    return MachineObject(
        name=metadata.text("name", needed=True),
        uid=metadata.text("uid", needed=True),
        version=metadata.text("resourceVersion"),
        generation=metadata.number("generation"),
        goal=goal,
        reason=spec.text("reason"),
        deleting=metadata.data.get("deletionTimestamp") is not None,
        status=_parse_status(fields.sub("status")),
    )


def _parse_status(status: Fields) -> MachineStatus:
    default, remedy = MachineStatus(), status.sub("remedy")
    return MachineStatus(
        goal=status.text("goal") or default.goal,
        state=status.text("state") or default.state,
        why=status.text("why"),
        node=status.text("node"),
        node_uid=status.text("nodeUid"),
        boot=status.text("boot"),
        provider=status.text("providerId"),
        gpus=tuple(status.strings("gpus")),
        worker=status.text("worker"),
        verdict=status.text("verdict"),
        ill=status.flag("ill"),
        repeats=status.number("repeats"),
        history=tuple(
            HistoryEntry(int(entry.moment("at")), entry.text("what", needed=True), entry.text("text"))
            for entry in status.subs("history")
        ),
        active_checks=tuple(_parse_active(entry) for entry in status.subs("activeChecks")),
        remedy=_parse_remedy(remedy) if remedy.data else None,
        remedies=status.number("remedies"),
        fulfilled=status.number("fulfilled"),
    )


def _parse_active(entry: Fields) -> ActiveHistory:
    passed_at = int(entry.moment("passedAt")) if entry.text("passedAt") else 0
    return ActiveHistory(entry.text("check", needed=True), int(entry.moment("at")), passed_at, entry.text("results"))


def _parse_remedy(remedy: Fields) -> Remedy:
    return Remedy(
        goal=remedy.text("goal", needed=True),
        number=remedy.number("number"),
        at=int(remedy.moment("at")),
        boot=remedy.text("boot"),
        done=remedy.flag("done"),
    )


def machine_status_json(status: MachineStatus) -> dict[str, object]:
    """Return the status as the API server stores it. Empty fields are left out: server-side apply then removes them."""
    fields: dict[str, object] = {
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
        "history": [
            _without_empty({"at": rfc3339(entry.at), "what": entry.what, "text": entry.text})
            for entry in status.history
        ],
        "activeChecks": [
            _without_empty(
                {
                    "check": entry.check,
                    "at": rfc3339(entry.at),
                    "passedAt": rfc3339(entry.passed_at) if entry.passed_at else "",
                    "results": entry.results,
                }
            )
            for entry in status.active_checks
        ],
        "remedies": status.remedies,
        "fulfilled": status.fulfilled,
    }
    if remedy := status.remedy:
        at = rfc3339(remedy.at)
        fields["remedy"] = _without_empty(
            {"goal": remedy.goal, "number": remedy.number, "boot": remedy.boot, "done": remedy.done, "at": at}
        )
    return _without_empty(fields)


def _without_empty(fields: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in fields.items() if value not in ("", [], None)}


def rfc3339(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
