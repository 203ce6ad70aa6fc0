"""Files that make people known: those of libnss-extrausers, and a file of keys for each person. Pure."""

from __future__ import annotations

from init.people.spec import has_access, valid_keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.people.spec import PeopleList

EXTRA = "/var/lib/extrausers"
# images/src/login/authorized-keys.c reads it.
KEYS = "/run/minivm/people/keys"
# Days since 1970: an account without a day of its last change would have to change its password.
CHANGED = 19000


def databases(people: PeopleList, now: float, homes: str) -> dict[str, str]:
    """Return passwd, group and shadow for everybody who has access now."""
    gids = {group.name: group.gid for group in people.groups}
    users = [person for person in people.users if has_access(person, now)]
    members: dict[str, list[str]] = {}
    for person in users:
        for name in person.groups:
            members.setdefault(name, []).append(person.name)
    passwd = [
        f"{user.name}:x:{user.uid}:{gids[user.group]}:{user.gecos}:{homes}/{user.name}:{user.shell}\n" for user in users
    ]
    group = [f"{item.name}:x:{item.gid}:{','.join(members.get(item.name, []))}\n" for item in people.groups]
    shadow = [f"{user.name}:*:{CHANGED}:0:99999:7:::\n" for user in users]
    return {"passwd": "".join(passwd), "group": "".join(group), "shadow": "".join(shadow)}


def keys(people: PeopleList, now: float) -> dict[str, str]:
    """Return each person's valid keys; a person without any has an empty file, and no other source is asked."""
    return {
        person.name: "".join(f"{key.line}\n" for key in valid_keys(person, now))
        for person in people.users
        if has_access(person, now)
    }
