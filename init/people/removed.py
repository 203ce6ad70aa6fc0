"""Decide whose jobs end because the person lost access: not at once, not many people together, never everybody. Pure.

A file can be emptied or cut by mistake, and no cancelled job comes back. So each loss of access is dated, jobs end only
after a grace in which the person may return, and more losses than usual wait for an operator's word.
"""

from __future__ import annotations

from init.records import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

# More people than this share, and than this number, within this time wait for `minivm people confirm`.
SHARE, FEW, WINDOW = 0.2, 2, 3600.0


@record(frozen=True, slots=True)
class AccessLoss:
    """A person without access, since when, and whether an operator must confirm that their jobs end."""

    name: str
    since: float
    waits: bool = False


@record(frozen=True, slots=True)
class Losses:
    """All people without access by uid, and the uids that a directory has taken over."""

    people: Mapping[int, AccessLoss] = {}  # never written to
    moved: frozenset[int] = frozenset()


def parse(data: Mapping[str, Any]) -> Losses | None:
    """Read what `to_json` wrote; None if there is nothing, or it is damaged."""
    try:
        people = {
            int(uid): AccessLoss(str(name), float(since), bool(waits))
            for uid, (name, since, waits) in data["people"].items()
        }
        return Losses(people, frozenset(map(int, data["moved"])))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def to_json(losses: Losses) -> dict[str, Any]:
    people = {str(uid): [loss.name, loss.since, loss.waits] for uid, loss in sorted(losses.people.items())}
    return {"people": people, "moved": sorted(losses.moved)}


def update(
    before: Losses | None,
    lost: Mapping[int, str],
    moved: Collection[int],
    active: int,
    now: float,
    *,
    sure: bool = True,
) -> Losses:
    """Date new losses; forget people who are back. Without a record everybody's jobs stay: nothing tells since when.

    `sure`: no directory may know them. One that is away answers as one that does not.
    """
    if before is None:
        return Losses({uid: AccessLoss(name, now, waits=True) for uid, name in lost.items()}, frozenset(moved))
    people = {
        uid: replace(loss, since=min(loss.since, now))
        for uid, loss in before.people.items()
        if lost.get(uid) == loss.name
    }
    new = lost.keys() - people.keys()
    recent = len(new) + sum(now - loss.since < WINDOW for loss in people.values())
    waits = not sure or not active or recent > most(active + recent)
    return Losses(people | {uid: AccessLoss(lost[uid], now, waits) for uid in new}, frozenset(moved))


def most(people: int) -> int:
    return max(FEW, int(people * SHARE))


def due(losses: Losses, grace: float, now: float) -> dict[int, AccessLoss]:
    return {uid: loss for uid, loss in losses.people.items() if not loss.waits and now >= loss.since + grace}


def confirm(losses: Losses, names: Collection[str], now: float) -> Losses:
    """Let the policy count for these people. Their grace starts now: a wrong word can be taken back by the file."""
    people = {
        uid: replace(loss, since=now, waits=False) if loss.waits and loss.name in names else loss
        for uid, loss in losses.people.items()
    }
    return replace(losses, people=people)
