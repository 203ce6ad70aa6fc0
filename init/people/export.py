"""Turn people of a directory into people of a file: what fits, and a note for each thing that does not. Pure."""

from __future__ import annotations

import json
import re

from init.people import read
from init.people.spec import FILE, SHELL, PeopleList, has_access
from init.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

WIDTH = 4096
LONGEST_NAME = 32


@record(frozen=True, slots=True)
class Account:
    """A person as the directory has them; `gids` are the groups beside the first one."""

    name: str
    uid: int
    gid: int
    gecos: str = ""
    home: str = ""
    shell: str = ""
    gids: tuple[int, ...] = ()


@record(frozen=True, slots=True)
class Export:
    """The people of the new file, and in words what differs from the directory."""

    people: PeopleList
    notes: tuple[str, ...] = ()


def compose(
    accounts: Sequence[Account],
    group_names: Mapping[int, str],
    keys: Mapping[str, Sequence[str]],
    *,
    homes: str,
    refused: Collection[str] = (),
    ended: str = "",
) -> Export:
    """Make a file's people. The directory keeps the `refused` out: their access ends at `ended`, their uids stay."""
    used = {account.gid for account in accounts} | {gid for account in accounts for gid in account.gids}
    groups, notes = _groups(sorted(used), group_names)
    known = frozenset(groups.values())
    users: list[dict[str, Any]] = []
    owners: dict[int, str] = {}
    for account in accounts:
        entry, problems = _entry(account, groups, keys.get(account.name, ()), homes)
        if account.name in refused:
            entry["until"] = ended
            problems.append("the directory keeps this person out now: without access here too")
        problem = read.person_problem(entry, known)
        if not problem and account.uid in owners:
            problem = f"uid: {account.uid} is also that of {owners[account.uid]}"
        if problem:
            notes.append(f"{quoted(account.name)} is left out: {problem}")
            continue
        owners[account.uid] = account.name
        notes += [f"{account.name}: {problem}" for problem in problems]
        users.append(entry)
    listed = {group for user in users for group in (user["group"], *user["groups"])}
    data = {"groups": [{"name": name, "gid": gid} for gid, name in groups.items() if name in listed], "users": users}
    return Export(read.parse(json.dumps(data).encode()), tuple(notes))


def _groups(gids: Iterable[int], names: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
    """Choose a name for each gid; files carry the gid alone, so that another name changes nothing of theirs."""
    notes: list[str] = []
    valid = [gid for gid in gids if not _note_system_group(gid, names, notes)]
    chosen: dict[int, str] = {}
    taken: set[str] = set()
    for is_exact in (True, False):
        for gid in valid:
            name = names.get(gid, "")
            wanted = name if is_exact else re.sub(r"[^a-z0-9_.-]+", "-", name.lower())[:LONGEST_NAME].strip("-.")
            if gid in chosen or wanted in taken or read.group_problem({"name": wanted, "gid": gid}):
                continue
            chosen[gid] = wanted
            taken.add(wanted)
    for gid in valid:
        if gid not in chosen:
            name = f"gid{gid}"
            while name in taken:
                name += "x"
            chosen[gid] = name
            taken.add(name)
        if chosen[gid] != names.get(gid):
            was = f"group {quoted(names[gid])} ({gid})" if gid in names else f"group {gid}, which has no name,"
            notes.append(f"{was} is called {chosen[gid]}")
    return {gid: chosen[gid] for gid in valid}, notes


def _note_system_group(gid: int, names: Mapping[int, str], notes: list[str]) -> bool:
    problem = read.group_problem({"name": "any", "gid": gid})
    if problem:
        notes.append(f"group {quoted(names.get(gid, ''))} ({gid}) is left out: {problem}")
    return bool(problem)


def _entry(
    account: Account, groups: Mapping[int, str], lines: Sequence[str], homes: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the person's entry, and what of it is not as in the directory."""
    notes: list[str] = []
    others = [groups[gid] for gid in account.gids if gid in groups]
    if len(others) > read.GROUPS_OF_USER:
        notes.append(f"groups: {len(others)}, the first {read.GROUPS_OF_USER} are taken")
    entry: dict[str, Any] = {"name": account.name, "uid": account.uid, "group": groups.get(account.gid, ""),
                             "groups": others[: read.GROUPS_OF_USER], "keys": []}  # fmt: skip
    if not entry["group"]:
        entry["group"] = str(account.gid)
    for field, value in (("shell", account.shell or SHELL), ("gecos", account.gecos)):
        if problem := read.field_problem(field, value):
            notes.append(problem)
        else:
            entry[field] = value
    if account.home != f"{homes}/{account.name}":
        notes.append(f"home: {quoted(account.home)} there, {homes}/{account.name} here; move the files")
    seen: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            key, comment = read.parse_key(line)
        except read.KeyProblem as problem:
            notes.append(f"key {number}: {problem.why}")
            continue
        if key not in seen:
            seen.append(key)
            entry["keys"].append(f"{key} {comment}".strip())
    if len(seen) > read.KEYS:
        notes.append(f"keys: {len(seen)}, the first {read.KEYS} are taken")
        del entry["keys"][read.KEYS :]
    if not seen:
        notes.append("no key: logs in only by one in the home")
    return entry, notes


def quoted(text: str) -> str:
    """Quote what a directory's author wrote: no line break or escape of a terminal gets through."""
    return json.dumps(text[:60])


def summary(exported: Export, now: float) -> str:
    active = sum(has_access(person, now) for person in exported.people.users)
    return f"{active} people with access of {len(exported.people.users)}, {len(exported.people.groups)} groups"


def render(exported: Export, source: str, at: str) -> str:
    """Return the text of the file."""
    notes = [f"# - {note}" for note in exported.notes]
    head = [f"# {FILE} of {at}, from {source}, by `minivm people export`.",
            "# Passwords, sudo rules and netgroups are not exported: people of a file log in by key."]  # fmt: skip
    head += [f"# {len(notes)} notes:"] * bool(notes) + notes
    return "\n".join(head) + "\n" + read.text(exported.people)
