"""Read slurmdbd's accounts and change them, by sacctmgr."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ground.commands import ran
from init.accounts import model
from init.accounts.calls import SacctmgrCall
from init.accounts.model import (
    ASSOCIATION_LIMITS,
    COORDINATOR,
    DEFAULT,
    QOS_LIMITS,
    Database,
    ObjectKey,
    ObjectKind,
    StoredObject,
    account,
    drop_inherited,
    qos,
    read_mark,
    user,
)
from init.errors import InitError
from init.pod.addresses import CONTROLLER
from init.slurm import client
from init.slurm.conf import setting

WITHIN = 120.0  # for a call of 200 users, on a loaded machine
CONFIGURATIONS = ("/etc/slurm/slurm.conf", client.FETCHED)
# What sacctmgr says, with an error, where a call that was cut had done its work already.
DONE_ALREADY = ("Already existing", "Data has not changed", "Nothing ")
ASSOCIATION = ("fairshare", *(name.lower() for name in ASSOCIATION_LIMITS), "qos", "defaultqos")
QOS = ("priority", "preempt", "flags", "gracetime", "usagefactor", *(name.lower() for name in QOS_LIMITS))
SHAPES = {name.lower(): shape for name, shape in {**ASSOCIATION_LIMITS, **QOS_LIMITS}.items()}
UNSET = {"gracetime": "0", "usagefactor": "1.000000"}


class AccountsError(InitError):
    """slurmdbd could not be read or changed, or a change needs a person's word."""


def cluster_name() -> str:
    """Return ClusterName of the configuration that this pod has."""
    for path in CONFIGURATIONS:
        try:
            name = setting(Path(path).read_text(errors="replace"), "ClusterName")
        except OSError:
            continue
        if model.is_name(name.lower()):
            return name.lower()
    raise AccountsError("look at the accounts", "this pod has no slurm.conf with a ClusterName")


def sacctmgr(*arguments: str) -> str:
    """Run sacctmgr and return its output; AccountsError with its own words."""
    argv = [client.SACCTMGR, *arguments]
    what = f"run {' '.join(arguments)[:200]}"
    try:
        done = ran(argv, within=WITHIN, env=client.environment(CONTROLLER))
    except subprocess.TimeoutExpired:
        raise AccountsError(what, f"sacctmgr has not answered within {WITHIN:.0f} s") from None
    except OSError as error:
        raise AccountsError(what, error.strerror or str(error)) from error
    if done.returncode:
        text = " ".join((done.stderr + done.stdout).split())
        raise AccountsError(what, text[-600:] or "sacctmgr failed and said nothing")
    return done.stdout


def rows(
    entity: Sequence[str], columns: Sequence[str], *, key: str = "", ask: Callable[..., str] = sacctmgr
) -> Iterator[list[str]]:
    """Return one list of cells a line; the last column may contain the delimiter.

    A coordinator may write a comment with a line break, which would become a row. So the rows are counted once more
    without free text; `key`, by default the first column, is a column that has none.
    """
    lines = _lines(ask("-nP", "show", *entity, f"format={','.join(columns)}"))
    plain = _lines(ask("-nP", "show", *entity, f"format={key or columns[0]}"))
    rows = [line.split("|", len(columns) - 1) for line in lines]
    if len(lines) != len(plain) or any(len(cells) != len(columns) for cells in rows):
        what = f"read slurmdbd's {entity[0]} rows"
        hint = (
            f"sacctmgr show {entity[0]} format={columns[0]},{columns[-1]}; or slurmdbd changed meanwhile: run it again"
        )
        raise AccountsError(what, "a comment or description has a line break", hint=hint)
    yield from rows


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def read(cluster: str, *, ask: Callable[..., str] = sacctmgr) -> Database:
    """Ask for everything once."""
    objects: dict[ObjectKey, StoredObject] = {}
    partitioned: set[ObjectKey] = set()
    accounts = {
        name: (coordinators, organization, description)
        for name, coordinators, organization, description in rows(
            ("account", "withcoord"), ("account", "coordinators", "organization", "description"), ask=ask
        )
    }
    users: dict[str, str] = {}
    defaults: dict[str, str] = {}
    for name, level, default in rows(("user", f"cluster={cluster}"), ("user", "adminlevel", "defaultaccount"), ask=ask):
        users[name], defaults[name] = level.lower().replace("none", ""), default
    for name, *cells, description in rows(("qos",), ("name", *QOS, "description"), ask=ask):
        objects[qos(name)] = StoredObject(_fields(QOS, cells), read_mark(cluster, description))
    columns = ("account", "user", "partition", "parentname", *ASSOCIATION, "comment")
    for of, name, partition, parent, *cells, comment in rows(
        ("assoc", f"cluster={cluster}", "WOPLimits"), columns, key="id", ask=ask
    ):
        if partition:
            partitioned.add(user(name, of))
            continue
        fields = _fields(ASSOCIATION, cells)
        if name:
            fields |= {DEFAULT: "yes"} if defaults.get(name) == of else {}
            fields |= {"adminlevel": users[name]} if users.get(name) else {}
        else:
            fields |= {"parent": parent} | _account(*accounts.get(of, ("", "", "")))
        objects[user(name, of) if name else account(of)] = StoredObject(fields, read_mark(cluster, comment))
    by_name = {key.name: stored.fields for key, stored in objects.items() if key.kind == ObjectKind.ACCOUNT.value}
    for name in by_name:
        objects[account(name)] = replace(objects[account(name)], fields=drop_inherited(by_name, name))
    tres = frozenset(f"{kind}/{name}" if name else kind for kind, name in rows(("tres",), ("type", "name"), ask=ask))
    return Database(objects, users, frozenset(accounts), tres, frozenset(partitioned))


def _account(coordinators: str, organization: str, description: str) -> dict[str, str]:
    names = filter(None, coordinators.split(","))
    fields = {"organization": organization.lower(), "description": description.lower()}
    return {field: value for field, value in fields.items() if value} | {
        f"{COORDINATOR}{name}": "yes" for name in names
    }


def _fields(names: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    fields = {name: _canonical(name, cell.strip()) for name, cell in zip(names, cells, strict=True)}
    return {name: value for name, value in fields.items() if value and UNSET.get(name) != value}


def _canonical(name: str, cell: str) -> str:
    if name in SHAPES and cell:
        return model.canonical(SHAPES[name], cell)
    if name == "gracetime":
        return model.seconds(cell)
    return model.normalise_names(cell) if name in ("qos", "preempt", "flags") else cell.lower()


def find_busy() -> frozenset[ObjectKey]:
    """Return the users in accounts, and the QOS, that have jobs which have not ended."""
    text = client.run([client.SQUEUE, "--all", "--noheader", "--format=%u|%a|%q"], CONTROLLER, within=30.0)
    busy_keys: set[ObjectKey] = set()
    for line in text.splitlines():
        name, of, level = [cell.strip() for cell in (*line.split("|"), "", "")][:3]
        busy_keys |= {
            user(name.lower(), of.lower()),
            qos(level.lower()),
        }  # the directory's spelling; slurmdbd has its own
    return frozenset(busy_keys)


def apply(call: SacctmgrCall) -> None:
    """Perform one call; what was done already is no error."""
    try:
        sacctmgr("-i", *call.argv)
    except AccountsError as error:
        if not any(words in error.why for words in DONE_ALREADY):
            raise
