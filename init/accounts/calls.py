"""Calls of sacctmgr that bring slurmdbd to a plan's end: as few as possible, in an order that is safe to cut. Pure.

QOS, coordinators who leave, accounts from the top, users, default accounts, admin levels, new coordinators; then
removals, from the bottom. Each call sets values and their mark together. A value that needs a call of its own enters
its object's mark after that call: a run that was cut finds it equal to the file's and records it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from init.accounts.model import COORDINATOR, DEFAULT, Database, Fields, ObjectKind, coordinators, is_late, write_mark
from init.accounts.plan import TRES_LIMITS, AccountsPlan, ObjectChange, Op

# slurmdbd takes 2 ms for a user in calls of 100 and 3 ms in calls of 1,000; a call of its own would cost 30.
MOST_NAMES = 200
Argv = tuple[str, ...]
Settings = Callable[[ObjectChange], Argv]
QOS, ACCOUNT, USER = (kind.value for kind in ObjectKind)


@dataclass(frozen=True, slots=True)
class SacctmgrCall:
    argv: Argv  # without sacctmgr itself
    size: int = 1  # objects that it changes


def order_calls(plan: AccountsPlan, database: Database, cluster: str) -> list[SacctmgrCall]:
    return list(_Order(plan, database, cluster).order())


class _Order:
    def __init__(self, plan: AccountsPlan, database: Database, cluster: str) -> None:
        self.database, self.cluster = database, cluster
        self.of: dict[str, list[ObjectChange]] = defaultdict(list)
        for change in plan.changes:
            self.of[change.key.kind if change.op is not Op.REMOVE else f"-{change.key.kind}"].append(change)
        self.parents = {
            key.name: stored.fields.get("parent", "") for key, stored in database.objects.items() if key.kind == ACCOUNT
        }
        for change in self.of[ACCOUNT]:
            self.parents[change.key.name] = change.after["parent"]

    def order(self) -> Iterator[SacctmgrCall]:
        """Yield the calls in an order that sacctmgr accepts: a parent before its children, users after accounts."""
        levels = self.of[QOS]
        for change in levels:
            yield from self._call_for(change, ("qos",))
        for change in levels:
            yield from self._preempt(change)
        accounts = sorted(self.of[ACCOUNT], key=lambda change: (self._depth(change.key.name), change.key))
        # Before an account moves: below one with the same coordinator, its own looks inherited and would be left there.
        for change in accounts:
            yield from self._coordinators("delete", change)
        for change in accounts:
            yield from self._call_for(change, ("account",))
        users = self.of[USER]
        yield from self._add_users(change for change in users if change.op is Op.ADD and DEFAULT in change.after)
        yield from self._add_users(change for change in users if change.op is Op.ADD and DEFAULT not in change.after)
        yield from self._modify_users(users)
        yield from self._defaults(users)
        yield from self._admin_levels([*users, *self.of[f"-{USER}"]])
        for change in accounts:
            yield from self._coordinators("add", change)
        yield from self._marks([*levels, *accounts, *users])
        yield from self._remove_users(self.of[f"-{USER}"])
        removed = [change.key.name for change in self.of[f"-{ACCOUNT}"]]
        for name in sorted(removed, key=lambda name: (-self._depth(name), name)):
            yield SacctmgrCall(("delete", "account", f"name={name}", f"cluster={self.cluster}"))
        if levels := sorted(self.of[f"-{QOS}"], key=lambda change: change.key):
            yield SacctmgrCall(("delete", "qos", f"name={','.join(change.key.name for change in levels)}"), len(levels))

    def _depth(self, name: str) -> int:
        depth = 0
        while (parent := self.parents.get(name, "")) and depth < len(self.parents):
            name, depth = parent, depth + 1
        return depth

    def _choose_first_fields(self, change: ObjectChange) -> Fields:
        """Return the fields after the first call for this object: those of later calls as they were."""
        late = self._find_late_fields(change)
        before = {field: value for field, value in change.before.items() if field in late}
        return {field: value for field, value in change.after.items() if field not in late} | before

    def _find_late_fields(self, change: ObjectChange) -> set[str]:
        fields = {field for field in {*change.before, *change.after} if is_late(field)}
        if change.op is Op.ADD and change.key.account and change.key.name not in self.database.users:
            return fields - {DEFAULT, "adminlevel"}  # the call that adds a new user sets them
        if change.op is Op.ADD and change.key.kind == ACCOUNT and change.key.name in self.database.rows:
            fields |= {"description", "organization"}  # sacctmgr leaves those of an account that another cluster has
        return fields

    def _call_for(self, change: ObjectChange, kind: Argv) -> Iterator[SacctmgrCall]:
        first = self._choose_first_fields(change)
        where: Argv = (f"name={change.key.name}",)
        if kind == ("account",):
            where = (*where, f"cluster={self.cluster}")
        mark = self._mark(change, first, final=False)
        if change.op is Op.ADD:
            yield SacctmgrCall(("add", *kind, *where, *_settings(first, {}), mark))
            late = self._find_late_fields(change) & {"description", "organization"}
            if late:
                first = {**first, **{field: change.after[field] for field in late}}
                settings = (f"{field}={change.after[field]}" for field in sorted(late))
                yield SacctmgrCall(
                    ("modify", *kind, "where", *where, "set", *settings, self._mark(change, first, final=False))
                )
        elif settings_ := _settings(first, change.before):
            yield SacctmgrCall(("modify", *kind, "where", *where, "set", *settings_, mark))

    def _mark(self, change: ObjectChange, fields: Fields, *, final: bool) -> str:
        roster = change.roster
        if not final:
            stored = self.database.objects.get(change.key)
            roster = stored.mark.roster if stored is not None and stored.mark is not None else frozenset()
        name = "description" if change.key.kind == QOS else "comment"
        return f"{name}={write_mark(self.cluster, fields, roster)}"

    def _preempt(self, change: ObjectChange) -> Iterator[SacctmgrCall]:
        value = change.after.get("preempt", "")
        if value != change.before.get("preempt", ""):
            mark = self._mark(change, change.after, final=True)
            yield SacctmgrCall(("modify", "qos", "where", f"name={change.key.name}", "set", f"preempt={value}", mark))

    def _add_users(self, changes: Iterable[ObjectChange]) -> Iterator[SacctmgrCall]:
        def settings(change: ObjectChange) -> Argv:
            first = self._choose_first_fields(change)
            own: Argv = ()
            if change.key.name not in self.database.users:
                level = change.after.get("adminlevel", "")
                own = (f"adminlevel={level}",) if level and DEFAULT in change.after else ()
                if DEFAULT in change.after:
                    own = (f"defaultaccount={change.key.account}", *own)
            return (*own, *_settings(first, {}), self._mark(change, first, final=False))

        for account, names, chosen in _group_users(changes, settings):
            where = (f"name={names}", f"account={account}", f"cluster={self.cluster}")
            yield SacctmgrCall(("add", "user", *where, *chosen), names.count(",") + 1)

    def _modify_users(self, changes: Iterable[ObjectChange]) -> Iterator[SacctmgrCall]:
        def settings(change: ObjectChange) -> Argv:
            first = self._choose_first_fields(change)
            chosen = _settings(first, change.before)
            return (*chosen, self._mark(change, first, final=False)) if chosen else ()

        yield from self._set_users((change for change in changes if change.op is Op.MODIFY), settings)

    def _set_users(self, changes: Iterable[ObjectChange], settings: Settings) -> Iterator[SacctmgrCall]:
        for account, names, chosen in _group_users(changes, settings):
            if chosen:
                where = ("where", f"name={names}", f"account={account}", f"cluster={self.cluster}")
                yield SacctmgrCall(("modify", "user", *where, "set", *chosen), names.count(",") + 1)

    def _defaults(self, changes: Iterable[ObjectChange]) -> Iterator[SacctmgrCall]:
        def settings(change: ObjectChange) -> Argv:
            is_new = DEFAULT in change.after and DEFAULT not in self._choose_first_fields(change)
            return (f"defaultaccount={change.key.account}",) if is_new else ()

        for _, names, chosen in _group_users(changes, settings):
            if chosen:
                where = ("where", f"name={names}", f"cluster={self.cluster}")
                yield SacctmgrCall(("modify", "user", *where, "set", *chosen), names.count(",") + 1)

    def _admin_levels(self, changes: Iterable[ObjectChange]) -> Iterator[SacctmgrCall]:
        levels: dict[str, str] = {}
        for change in changes:
            before, after = change.before.get("adminlevel", ""), change.after.get("adminlevel", "")
            if before != after and (change.op is Op.REMOVE or "adminlevel" in self._find_late_fields(change)):
                levels[change.key.name] = after or "none"
        for level in sorted(set(levels.values())):
            for names in _chunks(name for name, value in levels.items() if value == level):
                yield SacctmgrCall(
                    ("modify", "user", "where", f"name={names}", "set", f"adminlevel={level}"), names.count(",") + 1
                )

    def _coordinators(self, word: str, change: ObjectChange) -> Iterator[SacctmgrCall]:
        before, after = coordinators(change.before), coordinators(change.after)
        if fields := before - after if word == "delete" else after - before:
            names = ",".join(sorted(field.removeprefix(COORDINATOR) for field in fields))
            yield SacctmgrCall((word, "coordinator", f"account={change.key.name}", f"names={names}"), 0)

    def _marks(self, changes: Sequence[ObjectChange]) -> Iterator[SacctmgrCall]:
        """Write the last marks: after values by later calls, for new members, and where the mark alone changes."""
        last: list[ObjectChange] = []
        for change in changes:
            first = self._choose_first_fields(change)
            is_set = change.op is Op.ADD or bool(_settings(first, change.before))
            if not is_set or first != change.after or self._mark(change, first, final=False) != self._final(change):
                last.append(change)
        for change in last:
            if change.key.kind == QOS and change.after.get("preempt", "") == change.before.get("preempt", ""):
                where = ("where", f"name={change.key.name}")
                yield SacctmgrCall(("modify", "qos", *where, "set", self._final(change)))
            elif change.key.kind == ACCOUNT:
                account = ("where", f"name={change.key.name}", f"cluster={self.cluster}")
                yield SacctmgrCall(("modify", "account", *account, "set", self._final(change)))
        users = [replace(change, op=Op.MODIFY) for change in last if change.key.account]
        yield from self._set_users(users, lambda change: (self._final(change),))

    def _final(self, change: ObjectChange) -> str:
        return self._mark(change, change.after, final=True)

    def _remove_users(self, changes: Iterable[ObjectChange]) -> Iterator[SacctmgrCall]:
        accounts: dict[str, list[str]] = defaultdict(list)
        for change in changes:
            accounts[change.key.name].append(change.key.account)
        together: dict[str, list[str]] = defaultdict(list)
        for name, of in accounts.items():
            together[",".join(sorted(of))].append(name)
        for of_all, names in sorted(together.items()):
            for chunk in _chunks(names):
                where = (f"name={chunk}", f"account={of_all}", f"cluster={self.cluster}")
                yield SacctmgrCall(("delete", "user", *where), chunk.count(",") + 1)


def _settings(after: Fields, before: Fields) -> Argv:
    """Return what one call sets, with the values that take a setting away."""
    settings = []
    for field in sorted({*after, *before}):
        value, old = after.get(field, ""), before.get(field, "")
        if is_late(field) or value == old or field in ("qos", "defaultqos"):
            continue
        if field in TRES_LIMITS:
            value = _tres(value, old)
        settings.append(f"{field}={value or _reset_value(field)}")
    if any(after.get(field, "") != before.get(field, "") for field in ("qos", "defaultqos")):
        # Both at once: slurmdbd refuses a list without the default QOS.
        settings += _levels(after, before)
    return tuple(settings)


def _levels(after: Fields, before: Fields) -> list[str]:
    settings = [f"qos={after.get('qos', '')}"] if "qos" in after or "qos" in before else []
    if "defaultqos" in after or "defaultqos" in before:
        settings.append(f"defaultqos={after.get('defaultqos', '-1')}")
    return settings


def _reset_value(field: str) -> str:
    return {"fairshare": "1", "gracetime": "0", "priority": "0", "usagefactor": "1"}.get(field, "-1")


def _tres(value: str, old: str) -> str:
    """Return the limit with a -1 for each that is no longer limited: sacctmgr keeps those that it is not given."""
    limits = dict(part.partition("=")[::2] for part in value.split(",") if part)
    dropped = {part.partition("=")[0] for part in old.split(",") if part} - limits.keys()
    return ",".join(f"{name}={count}" for name, count in sorted({**limits, **dict.fromkeys(dropped, "-1")}.items()))


def _group_users(changes: Iterable[ObjectChange], settings: Settings) -> Iterator[tuple[str, str, Argv]]:
    """Group users of one account who get the same settings: (account, names, settings)."""
    groups: dict[tuple[str, Argv], list[str]] = defaultdict(list)
    for change in changes:
        groups[change.key.account, settings(change)].append(change.key.name)
    for (account, chosen), names in groups.items():
        for chunk in _chunks(names):
            yield account, chunk, chosen


def _chunks(names: Iterable[str]) -> Iterator[str]:
    ordered = sorted(names)
    for start in range(0, len(ordered), MOST_NAMES):
        yield ",".join(ordered[start : start + MOST_NAMES])
