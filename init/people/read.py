"""Read `people.yaml` strictly: refuse anything unexpected, with its field and what to do.

The file is untrusted input: it may be huge, nested, repeated or cut. `init.people.spec` has the types of the result.
"""

from __future__ import annotations

import base64
import datetime
import os
import re
import stat
import struct
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ground.errors import one_line
from init.errors import ConfigError, raise_all
from init.fields import Reader, describe_value
from init.people.spec import FILE, IDS, SHELL, PeopleGroup, PeopleList, Person, PersonKey, to_mapping

PEOPLE = "the people"
WHAT = f"read {PEOPLE}"
LARGEST = 8 << 20
LAST = 253402300799  # the end of the year 9999: a later time is no date
USERS, GROUPS, KEYS, GROUPS_OF_USER = 20_000, 5_000, 32, 64
MOST_ERRORS = 50
NESTED = 8
LONGEST_LINE = 8192  # a key stays in one line
NAME = re.compile(r"[a-z](?:[a-z0-9_.-]{0,30}[a-z0-9_])?")
SHELL_PATH = re.compile(r"(?:/[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,62}){1,6}")
GECOS = 200
# Users and groups of Debian and of the images. A person of such a name would share files with the system's user, or
# could log in as that user.
SYSTEM = frozenset((
    "_apt", "adm", "audio", "avahi", "backup", "bin", "cdrom", "crontab", "daemon", "dialout", "dip", "disk", "fax",
    "fleet", "floppy", "ftp", "games", "git", "gnats", "input", "irc", "kmem", "kvm", "list", "lp", "mail", "man",
    "messagebus", "munge", "mysql", "news", "nobody", "nogroup", "openldap", "operator", "plugdev", "polkitd",
    "postfix", "postgres", "proxy", "render", "root", "sasl", "sgx", "shadow", "slurm", "src", "sshd", "sssd",
    "staff", "statd", "sudo", "sync", "sys", "systemd-journal", "systemd-network", "systemd-resolve",
    "systemd-timesync", "tape", "tty", "users", "utmp", "uucp", "uuidd", "video", "voice", "www-data",
))  # fmt: skip
# Types of keys that sshd accepts here (50-minivm.conf).
ED25519 = "ssh-ed25519"
RSA = "ssh-rsa"
SECURITY_KEY = "sk-ssh-ed25519@openssh.com"
KEY_TYPES = (ED25519, RSA, SECURITY_KEY)
RSA_BITS = range(2048, 16385)
# Points of small order: a signature by such a "key" can be made without a private one.
_PRIME = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8})
LONGEST_KEY = 4096
LONGEST_COMMENT = 200
Entry = TypeVar("Entry")
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PeopleLoader(_LOADER):  # type: ignore[misc, valid-type]  # the C loader is only known at run time
    """Load YAML; refuse repeated keys, and merged mappings, which let a few lines expand without end."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "a key is one word", key_node.start_mark)
            key = self.construct_object(key_node)
            if key in mapping:
                problem = f"{str(key)[:40]!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_PeopleLoader.add_constructor("tag:yaml.org,2002:map", _PeopleLoader.construct_mapping)


def read_file(path: Path) -> PeopleList:
    return parse(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Read a regular file of bounded size; ConfigError otherwise, also when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(WHAT, "not a regular file", file=str(path))
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(WHAT, error.strerror or str(error), file=str(path)) from error
    if len(data) > LARGEST:
        raise ConfigError(WHAT, f"more than {LARGEST >> 20} MiB", file=str(path), hint="split the cluster's people")
    return data


def text(people: PeopleList) -> str:
    """Return the people as a file for a person to read and edit: what has its default is left out."""
    data = to_mapping(people)
    for user in data["users"]:
        for key in ("groups", "gecos", "keys"):
            if not user[key]:
                del user[key]
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=LONGEST_LINE))


def person_problem(entry: Mapping[str, object], groups: frozenset[str]) -> str:
    """Tell why a file with this entry would be refused; "" if it would not."""
    return _problem(lambda: _person(Reader(entry, PEOPLE, FILE), groups))


def group_problem(entry: Mapping[str, object]) -> str:
    return _problem(lambda: _group(Reader(entry, PEOPLE, FILE)))


def field_problem(field: str, value: str) -> str:
    """Tell what is wrong with a person's `shell` or `gecos`."""
    at = Reader({field: value}, PEOPLE, FILE)
    return _problem(lambda: {"shell": _shell, "gecos": _gecos}[field](at))


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError as error:
        return f"{error.field}: {error.why}"
    return ""


def parse(data: bytes, file: str = FILE) -> PeopleList:
    """Parse the file; ConfigError for all wrong entries in it, the first mistake of each."""
    return parse_mapping(_mapping(data, file), file)


def parse_mapping(data: Mapping[str, object], file: str = FILE) -> PeopleList:
    """Parse what a file has, without its YAML; refuse what `parse` refuses."""
    at = Reader(data, PEOPLE, file)
    _only(at, "groups", "users")
    for key in ("groups", "users"):
        if not isinstance(at.data.get(key), list):
            at.fail(key, f"wanted a list, not {_show(at.data.get(key))}", f"write `{key}: []` for none")
    errors: list[ConfigError] = []
    groups = _all(at, "groups", GROUPS, _group, errors)
    # A group with a mistake still counts as known, so that its people are not reported too.
    names = frozenset(name for entry in _dicts(at, "groups") if isinstance(name := entry.get("name"), str))
    users = _all(at, "users", USERS, lambda entry: _person(entry, names), errors)
    for where, key, values in (
        ("groups", "name", {index: group.name for index, group in groups.items()}),
        ("groups", "gid", {index: group.gid for index, group in groups.items()}),
        ("users", "name", {index: person.name for index, person in users.items()}),
        ("users", "uid", {index: person.uid for index, person in users.items()}),
    ):
        errors += _find_repeated(at, where, key, values)
    if len(errors) > MOST_ERRORS:
        more = ConfigError(WHAT, f"{len(errors) - MOST_ERRORS} more entries are wrong", file=file)
        errors = [*errors[:MOST_ERRORS], more]
    raise_all(WHAT, errors)
    return PeopleList(tuple(groups.values()), tuple(users.values()))


def _all(
    at: Reader, key: str, most: int, read: Callable[[Reader], Entry], errors: list[ConfigError]
) -> dict[int, Entry]:
    """Read the entries of a list; add the error of each wrong one. Return the others by their place."""
    entries: dict[int, Entry] = {}
    value = at.data.get(key)
    assert isinstance(value, list)
    if len(value) > most:
        at.fail(key, f"{len(value):,} entries, more than {most:,}")
    for index, item in enumerate(value):
        try:
            entries[index] = read(_entry(at, f"{key}[{index}]", item))
        except ConfigError as error:
            errors.append(error)
    return entries


def _dicts(at: Reader, key: str) -> list[dict[str, Any]]:
    value = at.data.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _mapping(data: bytes, file: str) -> Mapping[str, object]:
    where = ""
    try:
        text = data.decode()
        _refuse_nesting(text)
        document = yaml.load(text, _PeopleLoader)
    except UnicodeDecodeError:
        raise ConfigError(WHAT, "not UTF-8 text", file=file) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        problem = one_line(getattr(error, "problem", None) or str(error))[:200]
        raise ConfigError(WHAT, f"not YAML: {problem}", file=file, field=where) from None
    except RecursionError:
        raise ConfigError(WHAT, "nested too deeply", file=file) from None
    except (ValueError, LookupError, AttributeError, OverflowError, TypeError):  # a 30th of February
        problem = "a value does not fit the type that YAML gives it, such as an impossible date"
        raise ConfigError(WHAT, problem, file=file, hint="write a date as 2027-01-31; quote text") from None
    if not isinstance(document, dict):
        raise ConfigError(WHAT, f"wanted a mapping with groups and users, not {_show(document)}", file=file)
    return document


def _refuse_nesting(text: str) -> None:
    """Refuse deep nesting and references before the parser builds anything.

    libyaml emits events without recursion, but builds objects with recursion in C: 8 MB of brackets would crash the
    process. A few lines of references can expand to any amount of data.
    """
    depth = 0
    for event in yaml.parse(text, _LOADER):
        if getattr(event, "anchor", None) is not None:
            raise _misuse(event, "an anchor or alias (& or *): write it out, or quote the text")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > NESTED:
                raise _misuse(event, "nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _misuse(event: yaml.Event, problem: str) -> yaml.YAMLError:
    line = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
    return yaml.YAMLError(f"{problem}{line}")


def _show(value: object) -> str:
    return describe_value(value)[:120]


def _only(at: Reader, *known: str) -> None:
    for key in at.data:
        if not isinstance(key, str) or len(key) > 64:
            at.fail("", f"unknown key {_show(key)}", f"known: {', '.join(known)}")
    at.only(*known)


def _entry(at: Reader, place: str, item: object) -> Reader:
    if not isinstance(item, dict):
        at.fail(place, f"wanted a mapping, not {_show(item)}")
    name = item.get("name")
    named = f"{place} ({name})" if isinstance(name, str) and NAME.fullmatch(name) else place
    return Reader(item, PEOPLE, at.file, named)


def _find_repeated(at: Reader, where: str, key: str, values: Mapping[int, object]) -> list[ConfigError]:
    first: dict[object, int] = {}
    errors = []
    for index, value in values.items():
        if value in first:
            reason = f"{value} is also that of {where}[{first[value]}]"
            field = f"{where}[{index}].{key}"
            errors.append(ConfigError(WHAT, reason, file=at.file, field=field, hint="give it another one"))
        first.setdefault(value, index)
    return errors


def _name(at: Reader, key: str = "name") -> str:
    value = at.data.get(key)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        expected = "a letter, then up to 31 of a-z 0-9 _ . -, all lower case"
        at.fail(key, f"wanted a name ({expected}), not {_show(value)}")
    if value in SYSTEM:
        at.fail(key, f"{value} is a name of the system", "choose another one")
    return value


def _number(at: Reader, key: str) -> int:
    value = at.data.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        at.fail(key, f"wanted a whole number, not {_show(value)}")
    if not any(value in numbers for numbers in IDS):
        expected = " or ".join(f"{numbers[0]} to {numbers[-1]}" for numbers in IDS)
        at.fail(key, f"wanted {expected}, not {str(value)[:20]}", "the numbers between and below are the system's")
    return value


def _group(at: Reader) -> PeopleGroup:
    _only(at, "name", "gid")
    return PeopleGroup(_name(at), _number(at, "gid"))


def _person(at: Reader, known: frozenset[str]) -> Person:
    _only(at, "name", "uid", "group", "groups", "shell", "gecos", "keys", "until")
    name = _name(at)
    group = _check_group(at, "group", at.data.get("group"), known)
    listed = _list(at, "groups", GROUPS_OF_USER)
    groups = tuple(_check_group(at, f"groups[{index}]", item, known) for index, item in enumerate(listed))
    if len({group, *groups}) != len(groups) + 1:
        at.fail("groups", "a group appears twice; the one of `group` need not be repeated")
    keys = tuple(_key(at, index, item) for index, item in enumerate(_list(at, "keys", KEYS)))
    if len({key.line for key in keys}) != len(keys):
        at.fail("keys", "a key appears twice", "keep one of them")
    uid = _number(at, "uid")
    return Person(name, uid, group, groups, _shell(at), _gecos(at), keys, _time(at, "until"))


def _list(at: Reader, key: str, most: int) -> list[object]:
    value = at.data.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        at.fail(key, f"wanted a list, not {_show(value)}")
    if len(value) > most:
        at.fail(key, f"{len(value):,} entries, more than {most}")
    return value


def _check_group(at: Reader, key: str, value: object, known: frozenset[str]) -> str:
    if not isinstance(value, str):
        at.fail(key, f"wanted a group's name, not {_show(value)}")
    if value not in known:
        at.fail(key, f"no group {value[:40]!r} in this file", "add it to `groups` with its gid")
    return value


def _shell(at: Reader) -> str:
    value = at.data.get("shell")
    if value is None:
        return SHELL
    if not isinstance(value, str) or not SHELL_PATH.fullmatch(value):
        at.fail("shell", f"wanted a path such as {SHELL}, not {_show(value)}")
    return value


def _gecos(at: Reader) -> str:
    value = at.data.get("gecos")
    if value is None:
        return ""
    if not isinstance(value, str) or not value.isprintable() or ":" in value or len(value) > GECOS:
        at.fail("gecos", f"wanted one line of at most {GECOS} characters without a colon, not {_show(value)}")
    return value


def _key(at: Reader, index: int, item: object) -> PersonKey:
    place = f"keys[{index}]"
    inside = ".".join(part for part in (at.path, place) if part)
    entry = Reader(item if isinstance(item, dict) else {"key": item}, PEOPLE, at.file, inside)
    _only(entry, "key", "expires")
    text = entry.data.get("key")
    if not isinstance(text, str):
        at.fail(place, f"wanted a public key in one line, not {_show(text)}")
    try:
        line, comment = parse_key(text)
    except KeyProblem as problem:
        at.fail(place, problem.why, problem.hint)
    return PersonKey(line, comment, _time(entry, "expires"))


def _time(at: Reader, key: str) -> int:
    """Read a date, which includes its day, or a time; both of UTC. Return seconds; 0 for none."""
    value = at.data.get(key)
    if value is None:
        return 0
    expected = "a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z"
    if isinstance(value, str) and len(value) <= 32:
        try:
            value = _parse_time(value)
        except ValueError:
            at.fail(key, f"wanted {expected}, not {_show(value)}")
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            at.fail(key, f"{value.isoformat()} has no time zone", "end it with Z for UTC")
    elif isinstance(value, datetime.date):
        midnight = datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
        return min(max(int(midnight.timestamp()) + 86400, 1), LAST)
    else:
        at.fail(key, f"wanted {expected}, not {_show(value)}")
    return min(max(int(value.timestamp()), 1), LAST)


def _parse_time(text: str) -> datetime.date:
    if len(text) == 10:
        return datetime.date.fromisoformat(text)
    return datetime.datetime.fromisoformat(text)


class KeyProblem(Exception):
    """Why a text is no key, and what to do."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def parse_key(text: str) -> tuple[str, str]:
    """Return the key as "TYPE BODY", and its comment."""
    if len(text) > LONGEST_KEY:
        raise KeyProblem(f"{len(text)} characters, more than {LONGEST_KEY}", "copy one line of a .pub file")
    if not text.isprintable():
        raise KeyProblem("more than one line, or control characters", "one entry for each key")
    if "PRIVATE KEY" in text:
        raise KeyProblem("a private key", "make a new key; copy the .pub file")
    kind, _, rest = text.strip().partition(" ")
    body, _, comment = rest.strip().partition(" ")
    if kind not in KEY_TYPES:
        raise KeyProblem(*_explain_type(kind, text))
    if len(comment) > LONGEST_COMMENT:
        raise KeyProblem(f"a comment of {len(comment)} characters, more than {LONGEST_COMMENT}")
    try:
        data = base64.b64decode(body.encode("ascii"), validate=True)
    except ValueError:
        raise KeyProblem(f"the body after {kind} is not base64", "copy the whole line of the .pub file") from None
    parts = _key_parts(data)
    if parts is None or not parts or parts[0] != kind.encode():
        raise KeyProblem(f"the body is not one of {kind}, or it is cut", "copy the whole line of the .pub file")
    if problem := _key_problem(kind, parts):
        raise KeyProblem(problem, "make a new one: ssh-keygen -t ed25519")
    return f"{kind} {base64.b64encode(data).decode()}", comment.strip()


def _explain_type(kind: str, text: str) -> tuple[str, str]:
    accepted = ", ".join(KEY_TYPES)
    if any(name in text for name in KEY_TYPES):
        return "options before the key", f"write the key alone: one of {accepted}"
    if kind.startswith(("ecdsa-", "sk-ecdsa-", "ssh-dss")):
        return f"{kind} is not accepted by this sshd", "make a new one: ssh-keygen -t ed25519"
    return f"{kind[:40]!r} is no type of key", f"accepted: {accepted}"


def _key_parts(data: bytes) -> list[bytes] | None:
    """Split the body into its parts, each after its length; None if they do not fit."""
    parts = []
    while data:
        if len(data) < 4:
            return None
        (size,) = struct.unpack(">I", data[:4])
        if size > len(data) - 4:
            return None
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def _key_problem(kind: str, parts: list[bytes]) -> str:
    if kind == RSA:
        if len(parts) != 3:
            return "an RSA key has two numbers"
        bits = int.from_bytes(parts[2], "big").bit_length()
        return "" if bits in RSA_BITS else f"an RSA key of {bits} bits; wanted {RSA_BITS[0]} to {RSA_BITS[-1]}"
    count = 2 if kind == ED25519 else 3
    if len(parts) != count or len(parts[1]) != 32:
        return f"a key of {kind} has 32 bytes"
    point = (int.from_bytes(parts[1], "little") & (2**255 - 1)) % _PRIME
    return "a key for which anybody can sign" if point in SMALL_ORDER else ""
