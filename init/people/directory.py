"""Ask the site's directory for its people, and turn them into people of a file.

sssd lists people only where `enumerate` is set, and its list may be incomplete. So ldapsearch lists the names with
sssd's own settings; uid, groups and keys come from sssd, with its mappings and overrides, as this cluster sees them.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ground.commands import ran
from ground.errors import counted, one_line
from init.errors import ConfigError, InitError
from init.lean import record, replace
from init.people import read
from init.people.spec import FILE, SHELL, PeopleList, has_access
from init.pod.pod import Pod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

WHAT = "export the people"
CONF, SNIPPETS = "/etc/sssd/sssd.conf", "/etc/sssd/conf.d"
LDAPSEARCH, GETENT, KEYS = "/usr/bin/ldapsearch", "/usr/bin/getent", "/usr/bin/sss_ssh_authorizedkeys"
SSSCTL = "/usr/sbin/sssctl"
# A stack of Debian with sssd's account rules and without the rules of one service.
PAM_SERVICE = "common-account"
# What sssctl prints of an account that the directory keeps out: denied, expired, or with an expired password.
DENIALS = ("Permission denied", "User account has expired", "Authentication token")
BY_NAME = "give the names: minivm people export NAME..."
# Class and attribute of sssd's schemas (sssd-ldap(5)).
SCHEMAS = {"ad": ("user", "sAMAccountName")}
POSIX = ("posixAccount", "uid")
TLS = {
    "LDAPTLS_CACERT": "ldap_tls_cacert",
    "LDAPTLS_CACERTDIR": "ldap_tls_cacertdir",
    "LDAPTLS_CERT": "ldap_tls_cert",
    "LDAPTLS_KEY": "ldap_tls_key",
    "LDAPTLS_REQCERT": "ldap_tls_reqcert",
}
PAGE, AT_ONCE, BATCH = 500, 8, 200
LIST_WITHIN, ASK_WITHIN = 120.0, 30.0
LONGEST_NAME = 32
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
# What getent may be asked for: no option, no line break, no number, which it takes for a uid.
ASKABLE = re.compile(r"(?![0-9]+\Z)[A-Za-z0-9_][A-Za-z0-9_.@ -]{0,63}")


@record(frozen=True, slots=True)
class Search:
    """A search for names that sssd.conf describes."""

    domain: str
    uris: str
    base: str
    scope: str
    filter: str
    attribute: str
    start_tls: bool = False
    bind_dn: str = ""
    password: str = ""
    environment: Mapping[str, str] = {}  # never written to


def settings(pod: Pod) -> Mapping[str, Mapping[str, str]]:
    """Return the sections of sssd.conf and its snippets."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    paths = [pod.path(CONF), *sorted(pod.path(SNIPPETS).glob("[!.]*.conf"))]
    if not paths[0].exists():
        raise InitError(WHAT, "this pod has no directory", file=CONF, hint="mount an sssd.conf, or use a pod that has")
    for path in paths:
        try:
            parser.read_string(path.read_text(errors="replace"), str(path))
        except (OSError, configparser.Error) as error:
            raise ConfigError(WHAT, one_line(str(error))[:300], file=str(path)) from None
    return {section.lower(): dict(parser[section]) for section in parser.sections()}


def has_access_rules(sections: Mapping[str, Mapping[str, str]]) -> bool:
    """Tell if sssd keeps some of its people out."""
    return any(domain.get("access_provider", "permit") != "permit" for domain in domains(sections).values())


def domains(sections: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    listed = [name.strip().lower() for name in sections.get("sssd", {}).get("domains", "").split(",") if name.strip()]
    names = listed or [name.removeprefix("domain/") for name in sections if name.startswith("domain/")]
    return {name: sections.get(f"domain/{name}", {}) for name in names}


def searches(name: str, domain: Mapping[str, str]) -> list[Search]:
    """Return the domain's searches for people; ConfigError where ldapsearch cannot do what sssd does."""

    def refuse(field: str, why: str) -> ConfigError:
        return ConfigError(WHAT, why, file=CONF, field=f"[domain/{name}] {field}", hint=BY_NAME)

    if domain.get("id_provider") != "ldap":
        raise refuse("id_provider", f"the people of {domain.get('id_provider', 'no provider')!r} cannot be listed")
    if domain.get("ldap_sasl_mech"):
        raise refuse("ldap_sasl_mech", "names are listed without SASL only")
    if domain.get("ldap_default_authtok_type", "password").strip() != "password":
        raise refuse("ldap_default_authtok_type", "only a plain password can be used")
    uris = [uri for uri in re.split(r"[,\s]+", domain.get("ldap_uri", "")) if uri and uri != "_srv_"]
    if not uris:
        raise refuse("ldap_uri", "no server is named")
    bases = domain.get("ldap_user_search_base") or domain.get("ldap_search_base", "")
    parts = [part.strip() for part in bases.split("?")]
    if not parts[0]:
        raise refuse("ldap_search_base", "no base is named")
    kind, attribute = SCHEMAS.get(domain.get("ldap_schema", "").strip().lower(), POSIX)
    kind, attribute = domain.get("ldap_user_object_class", kind), domain.get("ldap_user_name", attribute)
    environment = {variable: domain[field] for variable, field in TLS.items() if domain.get(field)}
    bind = domain.get("ldap_default_bind_dn", "")
    password = domain.get("ldap_default_authtok", "") if bind else ""
    start_tls = domain.get("ldap_id_use_start_tls", "").strip().lower() == "true"
    listed = []
    for at in range(0, len(parts), 3):
        base, scope, more = (*parts[at : at + 3], "", "")[:3]
        matching = f"(objectClass={kind})({attribute}=*)"
        matching = f"(&{matching}{more if not more or more.startswith('(') else f'({more})'})"
        scope = {"onelevel": "one", "subtree": "sub", "": "sub"}.get(scope, scope)
        listed.append(
            Search(name, " ".join(uris), base, scope, matching, attribute, start_tls, bind, password, environment)
        )
    return listed


def list_names(search: Search) -> list[str]:
    """Return the names that the search finds. An incomplete answer is an error: missing people would lose access."""
    reader, writer = os.pipe()
    argv = [LDAPSEARCH, "-LLL", "-x", "-H", search.uris, "-b", search.base, "-s", search.scope, "-o", "ldif-wrap=no",
            "-o", "nettimeout=5", "-l", str(int(LIST_WITHIN)), "-E", f"pr={PAGE}/noprompt"]  # fmt: skip
    argv += ["-ZZ"] * search.start_tls
    argv += ["-D", search.bind_dn, "-y", f"/dev/fd/{reader}"] if search.bind_dn else []
    argv += [search.filter, search.attribute]
    env = {**ENVIRONMENT, **search.environment}
    try:
        with os.fdopen(writer, "wb") as file:
            file.write(search.password.encode()[:4096])
        done = ran(argv, within=LIST_WITHIN + 10, env=env, pass_fds=(reader,))
    except subprocess.TimeoutExpired:
        raise InitError(WHAT, f"{search.uris} gave no answer within {LIST_WITHIN:g} s", hint=BY_NAME) from None
    except FileNotFoundError:
        raise InitError(WHAT, f"this pod has no {LDAPSEARCH}", hint=f"use a controller's pod; or {BY_NAME}") from None
    finally:
        os.close(reader)
    if done.returncode:
        problem = one_line(done.stderr or f"exit status {done.returncode}")[:300]
        raise InitError(WHAT, f"{search.uris}, base {search.base}: {problem}", hint=BY_NAME)
    return list(ldif_values(done.stdout, search.attribute))


def ldif_values(text: str, attribute: str) -> Iterator[str]:
    """Read the attribute's values of an unwrapped LDIF."""
    prefix = attribute.lower()
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon or name.lower() != prefix:
            continue
        if value.startswith(":"):
            try:
                yield b64decode(value[1:].strip(), validate=True).decode(errors="replace")
            except ValueError:
                continue
        else:
            yield value.strip()


def _ask(argv: Sequence[str], about: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return ran(argv, within=ASK_WITHIN, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        problem = f"sssd gave no answer{about} within {ASK_WITHIN:g} s"
        raise InitError(WHAT, problem, hint="`minivm why`") from None


def _getent(database: str, keys: Sequence[str]) -> list[str]:
    """Ask sssd alone: files of the image and people of a file have the same names in no other place."""
    lines: list[str] = []
    for at in range(0, len(keys), BATCH):
        done = _ask([GETENT, "-s", "sss", database, "--", *keys[at : at + BATCH]])
        if done.returncode not in (0, 2):  # 2: at least one is not known
            raise InitError(WHAT, f"getent {database}: {one_line(done.stderr)[:200] or done.returncode}")
        lines += done.stdout.splitlines()
    return lines


def accounts(names: Iterable[str]) -> list[Account]:
    """Return the accounts that sssd knows, with the ids of their groups."""
    wanted = sorted({name for name in names if ASKABLE.fullmatch(name)})
    known: dict[str, Account] = {}
    for line in _getent("passwd", wanted):
        fields = line.split(":")
        if len(fields) == 7 and fields[2].isdecimal() and fields[3].isdecimal():
            name, _, uid, gid, gecos, home, shell = fields
            known[name] = Account(name, int(uid), int(gid), gecos, home, shell)
    askable = sorted(name for name in known if ASKABLE.fullmatch(name))
    for line in _getent("initgroups", askable):
        words = line.split()
        if words and words[0] in known:
            account = known[words[0]]
            gids = dict.fromkeys(int(word) for word in words[1:] if word.isdecimal())
            gids.pop(account.gid, None)
            known[words[0]] = replace(account, gids=tuple(gids))
    return [known[name] for name in sorted(known)]


def find_known_uids(uids: Iterable[int]) -> set[int]:
    fields = (line.split(":") for line in _getent("passwd", [str(uid) for uid in sorted(uids)]))
    return {int(row[2]) for row in fields if len(row) == 7 and row[2].isdecimal()}


def find_group_names(gids: Iterable[int]) -> dict[int, str]:
    fields = (line.split(":") for line in _getent("group", [str(gid) for gid in sorted(set(gids))]))
    return {int(row[2]): row[0] for row in fields if len(row) == 4 and row[2].isdecimal()}


def group_id(group: str) -> int:
    if ASKABLE.fullmatch(group):
        for line in _getent("group", [group]):
            if len(fields := line.split(":")) == 4 and fields[2].isdecimal():
                return int(fields[2])
    raise InitError(WHAT, f"sssd knows no group {group[:60]!r}")


def keys(names: Sequence[str]) -> dict[str, list[str]]:
    """Return each person's public keys. A failure is an error: an entry without keys would shut the person out."""

    def read(name: str) -> list[str]:
        done = _ask([KEYS, name], f" on the keys of {name}")
        if done.returncode:
            raise InitError(WHAT, f"keys of {name}: {one_line(done.stderr)[:200] or done.returncode}",
                            file=CONF, field="[sssd] services", hint="has it `ssh`? `minivm why`")  # fmt: skip
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def find_refused(names: Sequence[str]) -> set[str]:
    """Return the names that sssd's access rules refuse now: locked, expired, or not in an allowed group."""

    def is_refused(name: str) -> bool:
        argv = [SSSCTL, "user-checks", "-a", "acct", "-s", PAM_SERVICE, name]
        done = _ask(argv, f" on the access of {name}")
        answer = done.stdout + done.stderr
        if "pam_acct_mgmt: Success" in answer:
            return False
        if any(f"pam_acct_mgmt: {word}" in answer for word in DENIALS):
            return True
        # A directory that does not answer must lock out no user; a date in the past would.
        result = next((line for line in answer.splitlines() if "pam_acct_mgmt" in line), f"exit code {done.returncode}")
        raise InitError(
            WHAT, f"access of {name}: {one_line(result)[:200]}", hint="is the directory there? `minivm why`"
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {name for name, out in zip(names, pool.map(is_refused, names), strict=True) if out}


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
            notes.append(f"{quote(account.name)} is left out: {problem}")
            continue
        owners[account.uid] = account.name
        notes += [f"{account.name}: {problem}" for problem in problems]
        users.append(entry)
    listed = {group for user in users for group in (user["group"], *user["groups"])}
    data = {"groups": [{"name": name, "gid": gid} for gid, name in groups.items() if name in listed], "users": users}
    return Export(read.parse(json.dumps(data).encode()), tuple(notes))


def _groups(gids: Iterable[int], names: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
    """Choose a name for each gid; another name is harmless, because files carry the gid alone."""
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
            old_name = f"group {quote(names[gid])} ({gid})" if gid in names else f"group {gid}, which has no name,"
            notes.append(f"{old_name} is called {chosen[gid]}")
    return {gid: chosen[gid] for gid in valid}, notes


def _note_system_group(gid: int, names: Mapping[int, str], notes: list[str]) -> bool:
    problem = read.group_problem({"name": "any", "gid": gid})
    if problem:
        notes.append(f"group {quote(names.get(gid, ''))} ({gid}) is left out: {problem}")
    return bool(problem)


def _entry(
    account: Account, groups: Mapping[int, str], lines: Sequence[str], homes: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the person's entry, and what of it is not as in the directory."""
    notes: list[str] = []
    more_groups = [groups[gid] for gid in account.gids if gid in groups]
    if len(more_groups) > read.GROUPS_OF_USER:
        notes.append(f"groups: {len(more_groups)}, the first {read.GROUPS_OF_USER} are taken")
    entry: dict[str, Any] = {"name": account.name, "uid": account.uid, "group": groups.get(account.gid, ""),
                             "groups": more_groups[: read.GROUPS_OF_USER], "keys": []}  # fmt: skip
    if not entry["group"]:
        entry["group"] = str(account.gid)
    for field, value in (("shell", account.shell or SHELL), ("gecos", account.gecos)):
        if problem := read.field_problem(field, value):
            notes.append(problem)
        else:
            entry[field] = value
    if account.home != f"{homes}/{account.name}":
        notes.append(f"home: {quote(account.home)} there, {homes}/{account.name} here; move the files")
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


def quote(text: str) -> str:
    """Quote what a directory's author wrote: no line break or escape of a terminal gets through."""
    return json.dumps(text[:60])


def summary(exported: Export, now: float) -> str:
    active = sum(has_access(person, now) for person in exported.people.users)
    return numbers(exported.people, active)


def numbers(people: PeopleList, active: int) -> str:
    with_access = counted(active, "person", "people")
    return f"{with_access} with access of {len(people.users)}, {counted(len(people.groups), 'group')}"


def render(exported: Export, source: str, at: str) -> str:
    """Return the text of the file."""
    notes = [f"# - {note}" for note in exported.notes]
    head = [f"# {FILE} of {at}, from {source}, by `minivm people export`.",
            "# Passwords, sudo rules and netgroups are not exported: people of a file log in by key."]  # fmt: skip
    head += [f"# {counted(len(notes), 'note')}:"] * bool(notes) + notes
    return "\n".join(head) + "\n" + read.text(exported.people)
