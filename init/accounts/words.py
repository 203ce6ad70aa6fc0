"""A plan in words, objects that change alike in one line. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from init.accounts.model import COORDINATOR, DEFAULT, ObjectKey
from init.accounts.plan import AccountsPlan, ByHand, ObjectChange, Op
from init.accounts.values import ASSOCIATION_LIMITS, QOS_LIMITS

SHOWN = 5
PROPER = {name.lower(): name for name in (*ASSOCIATION_LIMITS, *QOS_LIMITS)} | {
    "qos": "qos", "defaultqos": "defaultQos", "adminlevel": "adminLevel", "gracetime": "graceTime (s)",
    "usagefactor": "usageFactor", "grpwall": "GrpWall (min)", "maxwall": "MaxWall (min)", DEFAULT: "default account",
}  # fmt: skip


def lines(plan: AccountsPlan) -> list[str]:
    """Describe the changes, by_hand and kept objects."""
    return [
        *_changes(plan.changes),
        *by_hand(plan.by_hand),
        *(f"keep {key}: it {why}" for key, why in sorted(plan.kept.items())),
    ]


def _changes(changes: Sequence[ObjectChange]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[ObjectKey]] = defaultdict(list)
    for change in changes:
        groups[change.op.value, change.key.account, change.key.kind, _what(change)].append(change.key)
    for (word, account, kind, what), keys in groups.items():
        yield f"{word} {_named(kind, account, [key.name for key in keys])}" + (f": {what}" if what else "")


def _named(kind: str, account: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    plural = kind + ("s" if len(names) > 1 and kind != "qos" else "")
    return f"{plural} {shown}" + (f" in {account}" if account else "")


def _what(change: ObjectChange) -> str:
    if change.op is Op.REMOVE:
        return ""
    if change.op is Op.ADD:
        return ", ".join(_plain(field, value) for field, value in sorted(change.after.items()))
    both = sorted({*change.before, *change.after})
    altered = [field for field in both if change.before.get(field, "") != change.after.get(field, "")]
    words = [_altered(field, change.before.get(field, ""), change.after.get(field, "")) for field in altered]
    return ", ".join(words) or change.note or "its list of members is recorded"


def _plain(field: str, value: str) -> str:
    return proper(field) if value == "yes" else f"{proper(field)} {value}"


def _altered(field: str, before: str, after: str) -> str:
    return f"{proper(field)} {before or 'none'} → {after or 'none'}"


def proper(field: str) -> str:
    return field if field.startswith(COORDINATOR) else PROPER.get(field, field)


def by_hand(found: Sequence[ByHand]) -> Iterator[str]:
    for one in found:
        if not one.field:
            yield f"removed by hand: {one.key}"
        else:
            yield f"changed by hand: {one.key}: {_altered(one.field, one.last, one.now)}"
