"""People and groups as `people.yaml` has them, and their form in JSON. Pure."""

from __future__ import annotations

from init.places import PEOPLE_FILE
from init.records import record

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
