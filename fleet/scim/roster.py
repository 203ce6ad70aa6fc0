"""The people of one Secret: `people.yaml`, and `scim.json` with what people.yaml has no place for. Pure.

people.yaml is the truth of people and groups, and may be edited by hand: what SCIM does not carry stays. scim.json
keeps the provider's names and ids, and every uid and gid that was ever given: of a removed person the entry stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleet.scim.filters import ScimError
from init.errors import InitError, ManyErrors
from init.lean import fields, record, replace
from init.people import read
from init.people.spec import FILE, IDS, PeopleGroup, PeopleList, Person, PersonKey, has_access, to_mapping

RECORDS = "scim.json"
# Kubernetes' limit of a Secret.
LARGEST = 1 << 20
USERS, GROUPS = "u", "g"
WORDS = {USERS: ("user", "uid"), GROUPS: ("group", "gid")}
LONGEST_TEXT = 256


@record(frozen=True, slots=True)
class ScimRecord:
    """A user or group of the provider. `given`: its userName or displayName as sent; `deleted`: when; 0: present."""

    name: str
    given: str
    external: str = ""
    created: int = 0
    modified: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """The group of every new person, and the first uid and gid to give."""

    group: str = "people"
    first: int = 100_000


@dataclass(frozen=True, slots=True)
class Requested:
    """A user or group as a request describes it; None: the request does not say."""

    given: str
    external: str | None = None
    active: bool | None = None
    gecos: str | None = None
    keys: tuple[str, ...] | None = None
    uid: int | None = None
    members: tuple[str, ...] | None = None


@dataclass(slots=True)
class Roster:
    """Users, groups and records by their SCIM id: u with the uid, g with the gid."""

    rules: Rules
    users: dict[str, Person] = field(default_factory=dict)
    groups: dict[str, PeopleGroup] = field(default_factory=dict)
    records: dict[str, ScimRecord] = field(default_factory=dict)

    def copy(self) -> Roster:
        return Roster(self.rules, {**self.users}, {**self.groups}, {**self.records})

    def people(self) -> PeopleList:
        return PeopleList(tuple(self.groups.values()), tuple(self.users.values()))

    def list_shown_groups(self) -> list[str]:
        """Return the ids of all groups but the one that every person has."""
        return [key for key, group in self.groups.items() if group.name != self.rules.group]

    def members(self) -> dict[str, list[str]]:
        """Return the ids of each group's members, by the group's name."""
        by_group: dict[str, list[str]] = {group.name: [] for group in self.groups.values()}
        for key, person in self.users.items():
            for name in (person.group, *person.groups):
                by_group[name].append(key)
        return by_group

    def put_user(self, key: str, wanted: Requested, now: int) -> str:
        """Create a user (key: "") or replace what the request says of one; return the id."""
        name = linux_name(wanted.given.partition("@")[0], "userName")
        key, record = self._record(USERS, key, name, wanted, now)
        person = self.users.get(key) or Person(name, int(key[1:]), self._common_group())
        if wanted.uid not in (None, person.uid):
            raise ScimError(400, f"uid: {name} has {person.uid}, and a uid never changes", "mutability")
        if wanted.gecos is not None:
            person = replace(person, gecos=wanted.gecos)
        if wanted.keys is not None:
            person = replace(person, keys=_keys(wanted.keys, person.keys))
        if wanted.active is not None and wanted.active != has_access(person, now):
            person = replace(person, until=0 if wanted.active else now)
        self._keep(key, record, person == self.users.get(key), now)
        self.users[key] = person
        return key

    def put_group(self, key: str, wanted: Requested, now: int) -> str:
        name = linux_name(wanted.given, "displayName")
        if name == self.rules.group:
            raise ScimError(409, f"displayName: {name} is the group of every person (people.scim.group)", "uniqueness")
        key, record = self._record(GROUPS, key, name, wanted, now)
        before = self.groups.get(key)
        if before and before.name != name:
            self._regroup({before.name: name})
        self.groups[key] = PeopleGroup(name, int(key[1:]))
        is_same = before == self.groups[key]
        if wanted.members is not None:
            is_same = not self._set_members(name, wanted.members) and is_same
        self._keep(key, record, is_same, now)
        return key

    def delete(self, key: str, now: int) -> None:
        """Remove a user or group. Its record stays, so that the number is never given again."""
        if self.users.pop(key, None) is None:
            common = self._common_group()
            self._regroup({self.groups.pop(key).name: common})
        self.records[key] = replace(self.records[key], deleted=now)

    def _set_members(self, name: str, members: Iterable[str]) -> bool:
        """Make these the group's members; return whether anything changed."""
        wanted = dict.fromkeys(members)
        for key in wanted:
            if key not in self.users:
                raise ScimError(400, f"members: there is no user {key[:40]!r}; groups in groups are not held",
                                "invalidValue")  # fmt: skip
        members_before = set(self.members()[name])
        for key in members_before - set(wanted):
            person = self.users[key]
            groups = tuple(group for group in person.groups if group != name)
            group = self._common_group() if person.group == name else person.group
            self.users[key] = replace(person, group=group, groups=tuple(item for item in groups if item != group))
        for key in (key for key in wanted if key not in members_before):
            self.users[key] = replace(self.users[key], groups=(*self.users[key].groups, name))
        return members_before != set(wanted)

    def _regroup(self, names: Mapping[str, str]) -> None:
        """Rename groups in all users; one that becomes the group of every person is only left."""
        for key, person in self.users.items():
            if {person.group, *person.groups} & names.keys():
                group = names.get(person.group, person.group)
                groups = dict.fromkeys(names.get(name, name) for name in person.groups)
                remaining = tuple(name for name in groups if name not in (group, self.rules.group))
                self.users[key] = replace(person, group=group, groups=remaining)

    def _common_group(self) -> str:
        if all(group.name != self.rules.group for group in self.groups.values()):
            number = self._number(GROUPS)
            self.groups[f"{GROUPS}{number}"] = PeopleGroup(self.rules.group, number)
            self.records[f"{GROUPS}{number}"] = ScimRecord(self.rules.group, self.rules.group)
        return self.rules.group

    def _record(self, kind: str, key: str, name: str, wanted: Requested, now: int) -> tuple[str, ScimRecord]:
        """Find or make the record of a request; ScimError where the name or number is another one's."""
        word, number_word = WORDS[kind]
        given, external = _text(wanted.given, "name"), _text(wanted.external or "", "externalId")
        owners = [other for other, record in self.records.items() if other[0] == kind and record.name == name]
        # A group may have taken the name of a removed one.
        owner = min(owners, key=lambda other: self.records[other].deleted, default="")
        if key:
            if kind == USERS and self.records[key].name != name:
                old_name = self.records[key].name
                raise ScimError(400, f"userName: a user's Linux name stays; it is {old_name}, not {name}", "mutability")
            if owner not in ("", key) and not self.records[owner].deleted:
                raise ScimError(409, f"{name} is the name of {owner}", "uniqueness")
            record = self.records[key]
            external_id = record.external if wanted.external is None else external
            return key, replace(record, name=name, given=given, external=external_id, created=record.created or now)
        if owner:
            record = self.records[owner]
            if record.created and not record.deleted:
                raise ScimError(409, f"there is a {word} {name} already: {owner}", "uniqueness")
            if record.deleted and record.external != external:
                raise ScimError(409, f"{name} was removed and keeps the {number_word} {owner[1:]}; another externalId"
                                     " means another one: choose another name", "uniqueness")  # fmt: skip
            return owner, replace(record, given=given, external=external, created=record.created or now, deleted=0)
        number = self._number(kind, wanted.uid)
        return f"{kind}{number}", ScimRecord(name, given, external, created=now)

    def _keep(self, key: str, record: ScimRecord, is_same: bool, now: int) -> None:
        if not is_same or record != self.records.get(key):
            self.records[key] = replace(record, modified=now)

    def _number(self, kind: str, wanted: int | None = None) -> int:
        if wanted is not None:
            if f"{kind}{wanted}" in self.records:
                owner = self.records[f"{kind}{wanted}"].name
                raise ScimError(409, f"uid: {wanted} is or was that of {owner}, and is never given again", "uniqueness")
            return wanted
        number = self.rules.first
        while f"{kind}{number}" in self.records or not any(number in ids for ids in IDS):
            if number >= IDS[-1][-1]:
                raise ScimError(507, f"no {WORDS[kind][1]} is left from {self.rules.first} on")
            number += 1
        return number


def linux_name(text: str, where: str) -> str:
    """Return the name in lower case. Letters of other alphabets stay as they are: some would become ASCII."""
    name = text.lower() if text.isascii() else text
    if problem := read.group_problem({"name": name, "gid": IDS[0][0]}):
        raise ScimError(400, f"{where}: {problem}", "invalidValue")
    return name


def _text(value: str, where: str) -> str:
    if len(value) > LONGEST_TEXT or not value.isprintable():
        raise ScimError(400, f"{where}: wanted one line of at most {LONGEST_TEXT} characters", "invalidValue")
    return value


def _keys(lines: Iterable[str], before: tuple[PersonKey, ...]) -> tuple[PersonKey, ...]:
    """Parse ssh keys; one that was there keeps its time of expiry."""
    expiry = {key.line: key.expires for key in before}
    keys = {}
    for text in lines:
        try:
            line, comment = read.parse_key(text)
        except read.KeyProblem as problem:
            hint = f"; {problem.hint}" if problem.hint else ""
            raise ScimError(400, f"sshKeys: {problem.why}{hint}", "invalidValue") from None
        keys[line] = PersonKey(line, comment, expiry.get(line, 0))
    return tuple(keys.values())


def load(data: Mapping[str, bytes], rules: Rules, now: int) -> Roster:
    """Read the Secret. SCIM takes over the people that an operator wrote into the file: each gets a record."""
    try:
        people = read.parse(data[FILE]) if data.get(FILE, b"").strip() else PeopleList()
        saved = json.loads(data.get(RECORDS) or b"{}")
        records = {key: ScimRecord(**record) for key, record in saved.get("records", {}).items()}
        roster = Roster(rules, records=records)
    except InitError as error:
        raise ScimError(503, f"the Secret's people.yaml is refused: {_first(error)}; correct it by hand") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ScimError(503, f"the Secret's {RECORDS} is damaged; restore it, or remove it: uids of removed people are"
                             " then forgotten") from None  # fmt: skip
    roster.groups = {f"{GROUPS}{group.gid}": group for group in people.groups}
    roster.users = {f"{USERS}{person.uid}": person for person in people.users}
    entries: dict[str, PeopleGroup | Person] = {**roster.groups, **roster.users}
    for key, entry in entries.items():
        record = records.setdefault(key, ScimRecord(entry.name, entry.name))
        if key[0] == USERS and record.name != entry.name:
            raise ScimError(503, f"people.yaml gives {entry.name} the uid of {record.name} ({key[1:]}); give another")
        records[key] = replace(record, name=entry.name, deleted=0)
    for key, record in records.items():
        if key not in entries and not record.deleted:
            records[key] = replace(record, deleted=now)
    return roster


def dump(roster: Roster) -> dict[str, bytes]:
    """Return both files, the first after the same check that each pod makes. One entry a line, for a person to read."""
    people = to_mapping(roster.people())
    try:
        read.parse_mapping(people)
    except InitError as error:
        raise ScimError(400, f"people.yaml would be refused: {_first(error)}", "invalidValue") from None
    lists = (f'"{key}": [{",".join(f"{chr(10)} {_json(entry)}" for entry in people[key])}]' for key in people)
    records = (
        f"\n {_json(key)}: {_json({name: value for name, value in fields(item).items() if value})}"
        for key, item in roster.records.items()
    )
    text = f'{{"records": {{{",".join(records)}}}}}\n'
    return {FILE: f"{{{', '.join(lists)}}}\n".encode(), RECORDS: text.encode()}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _first(error: InitError) -> str:
    first = error.errors[0] if isinstance(error, ManyErrors) else error
    return re.sub(r"\s+", " ", str(first))[:300]
