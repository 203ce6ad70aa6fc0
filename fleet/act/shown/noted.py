"""What is new in the status of a Machine or WorkerPool that is noted, in words for an Event; empty where nothing is."""

from __future__ import annotations

from fleet.decide.decide import MINUTE_S, NEWS
from fleet.world.machine import Event, Status
from fleet.world.pool import PoolStatus, Stand


def lines(before: Status, after: Status) -> tuple[Event, ...]:
    """Of its history, of which the oldest go."""
    old, now = before.history, after.history
    gone = next(many for many in range(len(old) + 1) if old[many:] == now[: len(old) - many])
    return now[len(old) - gone :]


def turned(before: PoolStatus, after: PoolStatus) -> tuple[Stand, ...]:
    """Conditions that say something else than they did. One that is new and good was never otherwise."""
    old = {one.type: (one.status, one.reason) for one in before.conditions}
    new = (one for one in after.conditions if old.get(one.type) != (one.status, one.reason))
    return tuple(one for one in new if one.type in old or one.status != "True")


def of_machine(before: Status, after: Status) -> str:
    return "; ".join(f"{one.what} {one.text}".rstrip() for one in lines(before, after))


def of_pool(before: PoolStatus, after: PoolStatus) -> str:
    said = (f"{one.type} is {one.status}, {one.reason}: {one.message}" for one in turned(before, after))
    return "; ".join(one.removesuffix(": ") for one in said)


class Often:
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
