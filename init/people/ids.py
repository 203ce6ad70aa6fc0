"""Keep names and user ids together: a uid is never changed, nor given to another name, without a person's word. Pure.

Files, jobs and processes carry uids alone: a changed uid loses a person's files, a reused one gives them away.
"""

from __future__ import annotations

from init.people.spec import NOBODY, PeopleList
from init.records import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from init.people.spec import PeopleGroup, Person

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
    was = {person.name: person for person in before.users}
    present = set(was)
    owners = {uid: name for name, uid in ids.items()}
    settled_ids, accepted, refused = dict(ids), [], []
    groups = [group for group in wanted.groups if not _is_taken(group, taken)]
    refused += [
        f"groups ({group.name}): the image has a group of this name or gid; choose another"
        for group in wanted.groups
        if _is_taken(group, taken)
    ]
    # A mistake in a group takes nothing from its people: they keep the group before.
    earlier = {group.name: group for group in before.groups if not _is_taken(group, taken)}
    for person in wanted.users:
        old = earlier.get(was[person.name].group) if person.name in was else None
        names, gids = {group.name for group in groups}, {group.gid for group in groups}
        if old and not {person.group, old.name} & names and old.gid not in gids:
            groups.append(old)
    valid = {group.name for group in groups}
    for entry in wanted.users:
        person, problem = _settled(entry, settled_ids, owners, present, taken)
        if not problem and person.group not in valid:
            problem = f"group: {person.group} is refused"
        if problem:
            refused.append(f"users ({person.name}).{problem}")
        if problem and person.name not in settled_ids:
            continue
        if person.name in taken.names or person.uid in taken.uids:
            continue
        if person.group not in valid and person.name in was:
            person = replace(person, group=was[person.name].group)
        if person.group not in valid or settled_ids.get(person.name, person.uid) != person.uid:
            continue
        settled_ids[person.name] = person.uid
        owners[person.uid] = person.name
        accepted.append(replace(person, groups=tuple(name for name in person.groups if name in valid)))
    return Settled(PeopleList(tuple(groups), tuple(accepted)), settled_ids, tuple(refused))


def _is_taken(group: PeopleGroup, taken: Taken) -> bool:
    return group.name in taken.names or group.gid in taken.gids


def _settled(
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
