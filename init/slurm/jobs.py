"""The jobs that a changed configuration might end, as squeue tells them. The reading is pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from init.slurm.client import SQUEUE
from init.slurm.conf import expanded, words

# The account last: without accounting it is whatever its user wrote, bars and line breaks too.
FIELDS = ("jobarrayid", "statecompact", "partition", "nodelist", "reqnodes", "tres-alloc", "qos", "account")
SHOW_JOBS = (SQUEUE, "--noheader", "--all", "--Format", ",".join(f"{name}:|" for name in FIELDS))
COUNT_JOBS = (SQUEUE, "--noheader", "--all", "--array", "--states=all", "--format=%i")
ID = re.compile(r"\d[\d_+,%:\[\]-]*", re.ASCII)
WAITS = ("PD", "RH", "RQ", "RD", "RF", "SE")


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    holds: bool  # has nodes; else it waits
    partitions: frozenset[str]
    nodes: frozenset[str]
    wanted: frozenset[str]  # nodes that it asked for by name
    account: str
    qos: str
    gres: frozenset[str]


def jobs(text: str) -> Iterator[Job]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|", len(FIELDS) - 1)]
        if len(cells) < len(FIELDS) or not ID.fullmatch(cells[0]):
            continue
        number, state, partitions, nodes, wanted, tres, qos, account = cells
        yield Job(
            id=number,
            holds=state not in WAITS,
            partitions=words(partitions),
            nodes=frozenset(expanded(_none(nodes))),
            wanted=frozenset(expanded(_none(wanted))),
            account=_none(account.removesuffix("|")),
            qos=_none(qos),
            gres=frozenset(
                part.partition("=")[0].removeprefix("gres/").partition(":")[0]
                for part in tres.split(",")
                if part.startswith("gres/")
            ),
        )


def _none(text: str) -> str:
    return "" if text in ("(null)", "N/A", "n/a", "(None assigned)") else text
