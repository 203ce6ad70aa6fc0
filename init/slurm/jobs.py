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
# `--array`, a line for each task, is one line short for an array with a step (24.11): they are counted here.
COUNT_JOBS = (SQUEUE, "--noheader", "--all", "--states=all", "--format=%i")
# Of an environment nothing: SQUEUE_PARTITION and the like would hide jobs. The tasks of an array, however many.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0"}
ID = re.compile(r"\d[\d_+,%:\[\]-]*", re.ASCII)
WAITING_TASKS = re.compile(r"\d+_\[([\d,:-]+)(?:%\d+)?\]", re.ASCII)
SOME_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
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


def count(text: str) -> int | None:
    """How many jobs these numbers are, each task of an array one: 7, 8_2, 9+1, 12_[0-8:2,11%3]; None where one of them
    is none."""
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
