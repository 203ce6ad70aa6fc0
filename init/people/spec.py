"""People and groups as `people.yaml` has them, their form in JSON, and how a new file becomes the pod's people. Pure.

A user id is never changed, nor given to another name, unless a person allows it: files, jobs and processes carry ids
alone, so a changed id loses a person's files and a reused one gives them away.
"""

from __future__ import annotations

from init.lean import record, replace
from init.places import PEOPLE_FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FILE = PEOPLE_FILE
# Below 1000 are system users. Debian keeps 60000 to 65533 for fixed and dynamic system users, minivm's among them, and
# 64500 to 64999 are the epilog's; 65534 is nobody, and 65535 and the last number mean "none" to system calls.
IDS = (range(1000, 60000), range(65536, 2**31 - 1))
SHELL = "/bin/bash"


@record(frozen=True, slots=True)
class PersonKey:
    """A public ssh key without its comment, and the time in seconds at which it expires; 0: never."""

    line: str
    comment: str = ""
    expires: int = 0


@record(frozen=True, slots=True)
class PeopleGroup:
    name: str
    gid: int


@record(frozen=True, slots=True)
class Person:
    """A user of the cluster; `until` is the time in seconds at which access ends, 0: never."""

    name: str
    uid: int
    group: str
    groups: tuple[str, ...] = ()
    shell: str = SHELL
    gecos: str = ""
    keys: tuple[PersonKey, ...] = ()
    until: int = 0


@record(frozen=True, slots=True)
class PeopleList:
    groups: tuple[PeopleGroup, ...] = ()
    users: tuple[Person, ...] = ()


NOBODY = PeopleList()


def has_access(person: Person, now: float) -> bool:
    return not person.until or now < person.until


def valid_keys(person: Person, now: float) -> list[PersonKey]:
    return [key for key in person.keys if not key.expires or now < key.expires]


def to_mapping(people: PeopleList) -> dict[str, Any]:
    """Return plain data: what `people.yaml` has, as the chart's values `people.users` and `people.groups`."""
    users = []
    for person in people.users:
        keys: list[object] = []
        for key in person.keys:
            line = f"{key.line} {key.comment}" if key.comment else key.line
            keys.append({"key": line, "expires": timestamp(key.expires)} if key.expires else line)
        entry: dict[str, object] = {"name": person.name, "uid": person.uid, "group": person.group}
        entry |= {"groups": [*person.groups], "shell": person.shell, "gecos": person.gecos, "keys": keys}
        users.append(entry | ({"until": timestamp(person.until)} if person.until else {}))
    return {"groups": [{"name": group.name, "gid": group.gid} for group in people.groups], "users": users}


def timestamp(seconds: int) -> str:
    import time  # imported late: few entries expire

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def from_state(data: Mapping[str, Any]) -> PeopleList:
    """Read what `to_state` wrote; ValueError, TypeError or KeyError for anything else."""
    users = []
    for name, uid, group, groups, shell, gecos, keys, until in data["users"]:
        person_keys = tuple(PersonKey(str(line), str(comment), int(expires)) for line, comment, expires in keys)
        person = Person(str(name), int(uid), str(group), tuple(groups), str(shell), str(gecos), person_keys, int(until))
        users.append(person)
    return PeopleList(tuple(PeopleGroup(str(name), int(gid)) for name, gid in data["groups"]), tuple(users))


def to_state(people: PeopleList) -> dict[str, Any]:
    return {
        "groups": [[group.name, group.gid] for group in people.groups],
        "users": [
            [person.name, person.uid, person.group, person.groups, person.shell, person.gecos,
             [[key.line, key.comment, key.expires] for key in person.keys], person.until]
            for person in people.users
        ],
    }  # fmt: skip


FORGET = "`minivm people forget NAME` in this pod allows it"


@record(frozen=True, slots=True)
class Taken:
    """Names and numbers that the image's own users and groups have."""

    names: frozenset[str] = frozenset()
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()


NONE_TAKEN = Taken()


@record(frozen=True, slots=True)
class Settled:
    """The people who count, every name's uid that was ever seen, and the refused entries in words."""

    people: PeopleList
    ids: Mapping[str, int]
    refused: tuple[str, ...] = ()


def settle(
    wanted: PeopleList, ids: Mapping[str, int], before: PeopleList = NOBODY, taken: Taken = NONE_TAKEN
) -> Settled:
    """Take over a new file. A person with another uid than before keeps the one before, with the new keys."""
    earlier = {person.name: person for person in before.users}
    owners = {uid: name for name, uid in ids.items()}
    settled_ids, accepted = dict(ids), []
    refused = [
        f"groups ({group.name}): the image has a group of this name or gid; choose another"
        for group in wanted.groups
        if _is_taken(group, taken)
    ]
    groups = _settle_groups(wanted, before, taken)
    valid = {group.name for group in groups}
    for entry in wanted.users:
        person, problem = _settle_person(entry, settled_ids, owners, set(earlier), taken)
        if not problem and person.group not in valid:
            problem = f"group: {person.group} is refused"
        if problem:
            refused.append(f"users ({person.name}).{problem}")
        if problem and person.name not in settled_ids:
            continue
        if person.name in taken.names or person.uid in taken.uids:
            continue
        if person.group not in valid and person.name in earlier:
            person = replace(person, group=earlier[person.name].group)
        if person.group not in valid or settled_ids.get(person.name, person.uid) != person.uid:
            continue
        settled_ids[person.name] = person.uid
        owners[person.uid] = person.name
        accepted.append(replace(person, groups=tuple(name for name in person.groups if name in valid)))
    return Settled(PeopleList(tuple(groups), tuple(accepted)), settled_ids, tuple(refused))


def _settle_groups(wanted: PeopleList, before: PeopleList, taken: Taken) -> list[PeopleGroup]:
    """Return the valid groups. A mistake in a group takes nothing from its people: they keep the group before."""
    groups = [group for group in wanted.groups if not _is_taken(group, taken)]
    earlier_groups = {group.name: group for group in before.groups if not _is_taken(group, taken)}
    group_of = {person.name: earlier_groups.get(person.group) for person in before.users}
    for person in wanted.users:
        names, gids = {group.name for group in groups}, {group.gid for group in groups}
        earlier = group_of.get(person.name)
        if earlier and not {person.group, earlier.name} & names and earlier.gid not in gids:
            groups.append(earlier)
    return groups


def _is_taken(group: PeopleGroup, taken: Taken) -> bool:
    return group.name in taken.names or group.gid in taken.gids


def _settle_person(
    person: Person, known: Mapping[str, int], owners: Mapping[int, str], present: set[str], taken: Taken
) -> tuple[Person, str]:
    """Return the person as it may count, and why the entry is refused or changed; "" if it is taken as it is."""
    if person.name in taken.names or person.uid in taken.uids:
        return person, "name: the image has a user of this name or uid; choose another"
    uid = known.get(person.name)
    if uid is not None and uid != person.uid:
        problem = f"uid: {person.uid}, and {person.name} has had {uid} here: write {uid}, or another name; {FORGET}"
        return (replace(person, uid=uid) if person.name in present else person), problem
    owner = owners.get(person.uid, person.name)
    if owner != person.name:
        return person, f"uid: {person.uid} is that of {owner} here: give {person.name} another one; {FORGET}"
    return person, ""
