"""Jobs that a changed configuration might end, from squeue. The parsing is pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from init.slurm.client import SQUEUE
from init.slurm.conf import expanded, words

# The account is last: without accounting its user may have written anything, bars and line breaks included.
FIELDS = ("jobarrayid", "statecompact", "partition", "nodelist", "reqnodes", "tres-alloc", "qos", "account")
SHOW_JOBS = (SQUEUE, "--noheader", "--all", "--Format", ",".join(f"{name}:|" for name in FIELDS))
# `--array`, one line per task, misses a line for an array with a step (24.11), so tasks are counted here.
COUNT_JOBS = (SQUEUE, "--noheader", "--all", "--states=all", "--format=%i")
# A clean environment: SQUEUE_PARTITION and the like would hide jobs. SLURM_BITSTR_LEN=0 shows all array tasks.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0"}
ID = re.compile(r"\d[\d_+,%:\[\]-]*", re.ASCII)
WAITING_TASKS = re.compile(r"\d+_\[([\d,:-]+)(?:%\d+)?\]", re.ASCII)
SOME_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
WAITS = ("PD", "RH", "RQ", "RD", "RF", "SE")


@dataclass(frozen=True, slots=True)
class KnownJob:
    id: str
    holds: bool  # has nodes; otherwise it waits
    partitions: frozenset[str]
    nodes: frozenset[str]
    wanted: frozenset[str]  # nodes requested by name
    account: str
    qos: str
    gres: frozenset[str]


def jobs(text: str) -> Iterator[KnownJob]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|", len(FIELDS) - 1)]
        if len(cells) < len(FIELDS) or not ID.fullmatch(cells[0]):
            continue
        number, state, partitions, nodes, wanted, tres, qos, account = cells
        yield KnownJob(
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


def count(text: str) -> int | None:
    """Count the jobs in a list of ids, each array task as one: 7, 8_2, 9+1, 12_[0-8:2,11%3]; None if one is invalid."""
    total = 0
    for line in text.splitlines():
        array = WAITING_TASKS.fullmatch(line.strip())
        if array is None:
            if "[" in line or not ID.fullmatch(line.strip()):
                return None
            total += 1
            continue
        for part in array[1].split(","):
            tasks = SOME_TASKS.fullmatch(part)
            if tasks is None:
                return None
            first, last, step = int(tasks[1]), int(tasks[2] or tasks[1]), int(tasks[3] or 1)
            total += len(range(first, last + 1, step or 1))
    return total


def _none(text: str) -> str:
    return "" if text in ("(null)", "N/A", "n/a", "(None assigned)") else text
