"""The difference between accounts.yaml and slurmdbd, each field three ways: now, applied last, wanted. Pure.

Only an object with minivm's mark is owned. A field of it that is neither as applied last nor as wanted was changed by
hand. Nothing else is changed or removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from init.accounts import model
from init.accounts.file import AccountsFile
from init.accounts.model import (
    ASSOCIATION_LIMITS,
    COORDINATOR,
    DEFAULT,
    QOS_LIMITS,
    Database,
    Fields,
    ObjectKey,
    ObjectKind,
    OwnerMark,
    Shape,
    StoredObject,
    account,
    drop_inherited,
    is_late,
    keep_roster,
)

TRES_LIMITS = {name.lower() for name, shape in {**ASSOCIATION_LIMITS, **QOS_LIMITS}.items() if shape is Shape.TRES}
ROOT_QOS = "normal"  # made by slurmdbd itself


class Op(Enum):
    ADD = "add"
    MODIFY = "change"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """One object's change. With equal fields only the mark changes: to take the object over, or to end a cut run."""

    op: Op
    key: ObjectKey
    before: Fields
    after: Fields
    roster: frozenset[str] = frozenset()
    note: str = ""  # why the mark alone changes; "" if it is not worth a line


@dataclass(frozen=True, slots=True)
class ByHand:
    """A field of an owned object that was changed by hand; `field` is "" for a user who was removed by hand."""

    key: ObjectKey
    field: str
    last: str
    now: str


@dataclass(frozen=True, slots=True)
class AccountsPlan:
    changes: tuple[ObjectChange, ...]
    by_hand: tuple[ByHand, ...]
    unowned: tuple[ObjectKey, ...]  # objects that the file names and that exist without a mark
    kept: Mapping[ObjectKey, str]  # owned, no longer in the file, and why they stay
    problems: tuple[str, ...]


def make(wanted: AccountsFile, database: Database, busy: Set[ObjectKey], *, adopt: bool = False) -> AccountsPlan:
    """Compare. `busy`: users in accounts, and QOS, that have pending or running jobs."""
    return _Comparison(_drop_inherited(wanted, database), database, busy, adopt).plan()


def _drop_inherited(wanted: AccountsFile, database: Database) -> AccountsFile:
    """Return the file without coordinators of accounts that have them from an account above."""
    kept = {key: stored.fields for key, stored in database.objects.items() if key.kind == ObjectKind.ACCOUNT.value}
    both = {**kept, **wanted.objects}
    accounts = {key.name: fields for key, fields in both.items() if key.kind == ObjectKind.ACCOUNT.value}
    objects = {
        key: drop_inherited(accounts, key.name) if key.kind == ObjectKind.ACCOUNT.value else fields
        for key, fields in wanted.objects.items()
    }
    return replace(wanted, objects=objects)


class _Comparison:
    def __init__(self, wanted: AccountsFile, database: Database, busy: Set[ObjectKey], adopt: bool) -> None:
        self.wanted, self.database, self.busy, self.adopt = wanted, database, busy, adopt
        self.members: dict[str, set[str]] = defaultdict(set)  # account -> users of the file
        self.by_hand: list[ByHand] = []
        self.unowned: list[ObjectKey] = []
        self.levels: dict[str, str] = {}  # admin level of each user of the file
        for key, fields in wanted.objects.items():
            if key.account:
                self.members[key.account].add(key.name)
                self.levels[key.name] = fields.get("adminlevel", "")
        self.has_members = {key.name for key in (*database.objects, *database.partitioned) if key.account}
        self.owned_users = {key.name for key, stored in database.objects.items() if key.account and stored.mark}

    def plan(self) -> AccountsPlan:
        changes = [change for key, fields in self.wanted.objects.items() for change in self._change_wanted(key, fields)]
        kept_objects: dict[ObjectKey, str] = {}
        removed = list(self._removals(kept_objects))
        problems = tuple(self._problems())
        return AccountsPlan((*changes, *removed), tuple(self.by_hand), tuple(self.unowned), kept_objects, problems)

    def _change_wanted(self, key: ObjectKey, after: Fields) -> Iterator[ObjectChange]:
        stored = self.database.objects.get(key)
        roster = self._roster(key)
        if stored is None:
            if self._is_unowned_user(key) and not self.adopt:
                self.unowned.append(key)
            if self._was_removed(key):
                self.by_hand.append(ByHand(key, "", "", ""))
            level = self.database.users.get(key.name, "") if key.account else ""
            yield ObjectChange(Op.ADD, key, {"adminlevel": level} if level else {}, after, roster)
            return
        mark = stored.mark
        if mark is None:
            if self._was_removed(key):
                # The account's members have this user: a coordinator of the account cleared the mark.
                self.by_hand.append(ByHand(key, "mark", "minivm", ""))
            elif not self.adopt:
                self.unowned.append(key)
                return
            mark = OwnerMark(stored.fields)
            note = "taken over as it is"
        else:
            note = "" if mark.fields == after else "recorded, after a run that was cut"
            self._compare(key, stored.fields, mark.fields, after)
        if stored.fields != after or mark.fields != after or mark.roster != roster or stored.mark is None:
            yield ObjectChange(Op.MODIFY, key, stored.fields, after, roster, note)

    def _compare(self, key: ObjectKey, now: Fields, last: Fields, after: Fields | None) -> None:
        for field in sorted({*now, *last}):
            if after is None and is_late(field):
                continue  # it goes with another object: the user's new default, a coordinator who leaves
            value, before = now.get(field, ""), last.get(field, "")
            if value != before and (after is None or value != after.get(field, "")):
                self.by_hand.append(ByHand(key, field, before, value))

    def _roster(self, key: ObjectKey) -> frozenset[str]:
        return keep_roster(frozenset(self.members[key.name])) if key.kind == ObjectKind.ACCOUNT.value else frozenset()

    def _is_unowned_user(self, key: ObjectKey) -> bool:
        if not key.account or key.name in self.owned_users:
            return False
        return key.name in self.has_members or bool(self.database.users.get(key.name))

    def _was_removed(self, key: ObjectKey) -> bool:
        holder = self.database.objects.get(account(key.account)) if key.account else None
        return holder is not None and holder.mark is not None and key.name in holder.mark.roster

    def _removals(self, kept: dict[ObjectKey, str]) -> Iterator[ObjectChange]:
        removed = {
            key: stored
            for key, stored in self.database.objects.items()
            if stored.mark and key not in self.wanted.objects
        }
        users = {key for key in removed if key.account}
        for key in sorted(users & self.busy):
            kept[key] = "has pending or running jobs"
        for key in sorted(users & self.database.partitioned - kept.keys()):
            kept[key] = "has associations of single partitions, which are not in the file"
        self._keep_defaults(removed, kept)
        self._keep_accounts(removed, kept)
        self._keep_qos(removed, kept)
        staying = {key.name for key in self.database.objects if key.account and key not in removed}
        staying |= {key.name for key in self.database.partitioned}
        for key, stored in removed.items():
            if key not in kept:
                assert stored.mark is not None
                self._compare(key, stored.fields, stored.mark.fields, None)
                # A coordinator can write a mark, so it proves no right to the admin level of a user who stays.
                kept_level = stored.fields.get("adminlevel", "") if key.name in staying else ""
                level = self.levels.get(key.name, kept_level) if key.account else ""
                yield ObjectChange(Op.REMOVE, key, stored.fields, {"adminlevel": level} if level else {})

    def _keep_defaults(self, gone: Mapping[ObjectKey, StoredObject], kept: dict[ObjectKey, str]) -> None:
        """Keep a user's default account where the user stays in other accounts without another default."""
        staying = {key.name for key in self.database.objects if key.account and (key not in gone or key in kept)}
        staying |= {key.name for key in self.database.partitioned}
        named = {key.name for key in self.wanted.objects if key.account}
        for key, stored in gone.items():
            if key.account and DEFAULT in stored.fields and key.name in staying - named and key not in kept:
                kept[key] = "is the user's default account, and the user stays in another"

    def _keep_accounts(self, gone: Mapping[ObjectKey, StoredObject], kept: dict[ObjectKey, str]) -> None:
        accounts = {key for key in gone if key.kind == ObjectKind.ACCOUNT.value}
        moved = self.wanted.objects
        while True:
            stays = [key for key in self.database.objects if key not in gone or key in kept]
            needed = {key.account for key in (*stays, *self.database.partitioned) if key.account} | set(self.members)
            needed |= {
                moved.get(key, self.database.objects[key].fields).get("parent", "")
                for key in stays
                if key.kind == ObjectKind.ACCOUNT.value
            }
            needed |= {fields["parent"] for key, fields in moved.items() if key.kind == ObjectKind.ACCOUNT.value}
            needed_accounts = sorted(key for key in accounts - kept.keys() if key.name in needed)
            if not needed_accounts:
                return
            kept.update(dict.fromkeys(needed_accounts, "has users or accounts that stay"))

    def _keep_qos(self, gone: Mapping[ObjectKey, StoredObject], kept: dict[ObjectKey, str]) -> None:
        used: set[str] = set()
        for key, stored in self.database.objects.items():
            if key not in gone or key in kept:
                fields = self.wanted.objects.get(key, stored.fields)
                for field in ("qos", "defaultqos", "preempt"):
                    used |= set(fields.get(field, "").split(","))
        for key in gone:
            if key.kind != ObjectKind.QOS.value:
                continue
            if key.name == ROOT_QOS:
                kept[key] = "is the QOS that Slurm itself makes"
            elif key in self.busy:
                kept[key] = "has pending or running jobs"
            elif key.name in used:
                kept[key] = "is used by what stays"

    def _problems(self) -> Iterator[str]:
        for key, where in self.wanted.named.items():
            if key not in self.database.objects and key != account("root"):
                yield f"{self.wanted.file}: {where}: {key} is neither in the file nor in slurmdbd"
        for name, where in self.wanted.coordinators.items():
            if name not in self.database.users or name in self.owned_users:
                yield f"{self.wanted.file}: {where}: user {name} is neither in the file nor in slurmdbd"
        unknown: dict[str, ObjectKey] = {}
        for key, fields in self.wanted.objects.items():
            for field in TRES_LIMITS & fields.keys():
                for name in model.tres_names(fields[field]) - self.database.tres:
                    unknown.setdefault(name, key)
            if key in self.database.partitioned:
                yield f"{key} has associations of single partitions, made by hand; remove those first"
        for name, key in unknown.items():
            yield f"{key}: a limit on {name}, which this cluster does not count; add it to AccountingStorageTRES"


# A plan in words, objects that change alike in one line.

SHOWN = 5
PROPER = {name.lower(): name for name in (*ASSOCIATION_LIMITS, *QOS_LIMITS)} | {
    "qos": "qos", "defaultqos": "defaultQos", "adminlevel": "adminLevel", "gracetime": "graceTime (s)",
    "usagefactor": "usageFactor", "grpwall": "GrpWall (min)", "maxwall": "MaxWall (min)", DEFAULT: "default account",
}  # fmt: skip


def describe_plan(plan: AccountsPlan) -> list[str]:
    """Describe the changes, what people changed by hand, and the objects that stay."""
    return [
        *_describe_changes(plan.changes),
        *describe_by_hand(plan.by_hand),
        *(f"keep {key}: it {reason}" for key, reason in sorted(plan.kept.items())),
    ]


def _describe_changes(changes: Sequence[ObjectChange]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[ObjectKey]] = defaultdict(list)
    for change in changes:
        groups[change.op.value, change.key.account, change.key.kind, _describe_change(change)].append(change.key)
    for (word, owner, kind, what), keys in groups.items():
        yield f"{word} {_join_names(kind, owner, [key.name for key in keys])}" + (f": {what}" if what else "")


def _join_names(kind: str, account: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    plural = kind + ("s" if len(names) > 1 and kind != "qos" else "")
    return f"{plural} {shown}" + (f" in {account}" if account else "")


def _describe_change(change: ObjectChange) -> str:
    if change.op is Op.REMOVE:
        return ""
    if change.op is Op.ADD:
        return ", ".join(_describe_value(field, value) for field, value in sorted(change.after.items()))
    both = sorted({*change.before, *change.after})
    altered = [field for field in both if change.before.get(field, "") != change.after.get(field, "")]
    words = [_describe_altered(field, change.before.get(field, ""), change.after.get(field, "")) for field in altered]
    return ", ".join(words) or change.note or "its list of members is recorded"


def _describe_value(field: str, value: str) -> str:
    return proper(field) if value == "yes" else f"{proper(field)} {value}"


def _describe_altered(field: str, before: str, after: str) -> str:
    return f"{proper(field)} {before or 'none'} → {after or 'none'}"


def proper(field: str) -> str:
    return field if field.startswith(COORDINATOR) else PROPER.get(field, field)


def describe_by_hand(changes: Sequence[ByHand]) -> Iterator[str]:
    for item in changes:
        if not item.field:
            yield f"removed by hand: {item.key}"
        else:
            yield f"changed by hand: {item.key}: {_describe_altered(item.field, item.last, item.now)}"
