"""The lease on the right to act as the controller: one active pod out of several, on the volume of the state itself.

Each **term** of leadership is a file `lease/term-N` that its holder alone creates and renews. Creating it by `link`
succeeds for one pod only, on NFS too, so a term never has two holders, whatever the clocks do and whoever was stopped
meanwhile. No lock is held: a stopped process could never release it.

Time decides only *when* a pod may create the next term. No clocks of two machines are compared, as in
`fleet.act.leader_election`: a contender measures by its own clock for how long the newest term's file has not changed;
the holder measures from the beginning of the renewal. All times here are of CLOCK_BOOTTIME, which also counts while the
machine is suspended. A hold that has lapsed is never renewed: the pod contends for a new term.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ground.files import read_plain, rewrite, write_whole
from init.fields import number
from init.records import record, replace
from init.slurm.place import LEASE

# A term whose file has not changed for so long is free. Never change this: in an upgrade two versions run together.
LASTS_S = 8.0
# The holder acts for so long after a renewal began; the difference covers clocks of another pace, and the kill.
HOLDS_S = 5.0
RENEW_S = 2.0
# A renewal that took longer does not count: PID 1's watchdog (4 s) begins at its end, and must bite before LASTS_S.
WITHIN_S = 2.0
# From the last look at the newest term to the claim of the next one.
FRESH_S = 1.0
NEVER = float("-inf")
KEPT = 5  # files of former terms
LENGTH = 511  # of a file without its newline: a block of the disk, which is written whole
_NAME = re.compile(r"term-([1-9][0-9]{0,8})", re.ASCII)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@record(frozen=True, slots=True)
class Term:
    """The newest term, as its file says. The text identifies a renewal; the rest is empty in a damaged file."""

    number: int
    text: bytes = b""
    holder: str = ""
    life: str = ""  # of the holder's container
    released: bool = False
    alone: bool = False  # of a cluster with one controller, which renews nothing
    serves: bool = False  # its slurmctld is ready, and clients are led to it
    heir: str = ""  # the pod to which the holder hands over; no other may follow while LASTS_S has not passed


@record(frozen=True, slots=True)
class Contest:
    """One pod's view of the lease, by its own clock."""

    seen: Term | None = None
    since: float = NEVER  # since when that term's file has not changed
    looked: float = NEVER
    mine: int = 0  # the term that this pod has; 0: none
    starts: float = NEVER  # from when on it may act in that term
    until: float = NEVER  # until when

    def holds(self, at: float) -> bool:
        return bool(self.mine) and self.starts <= at < self.until

    def lapsed(self, at: float) -> bool:
        return bool(self.mine) and at >= self.until


# Pure decisions.
def after_look(contest: Contest, newest: Term | None, begun: float, ended: float) -> Contest:
    """Update the view after a look at the newest term. A change happened before the look ended, at the latest."""
    if contest.mine and (newest is None or newest.number != contest.mine):
        contest = replace(contest, mine=0, until=NEVER)
    same = contest.looked != NEVER and newest == contest.seen
    return replace(contest, seen=newest, since=contest.since if same else ended, looked=begun)


def next_term(contest: Contest, life: str, at: float, *, first: bool, holder: str = "") -> int:
    """Return the term that this pod may claim now, or 0.

    Pod 0 alone (`first`) begins after a single controller: the pod that replaces that controller has its name, and no
    other pod can know that the single one has ended.
    """
    newest = contest.seen
    if contest.mine or at - contest.looked > FRESH_S:
        return 0
    if newest is None or newest.alone:
        return (newest.number if newest else 0) + 1 if first else 0
    if newest.heir and newest.heir != holder and at - contest.since < LASTS_S:
        return 0
    if newest.released or (newest.life and newest.life == life) or at - contest.since >= LASTS_S:
        return newest.number + 1
    return 0


def after_claim(contest: Contest, mine: Term, former: Term | None, begun: float, at: float) -> Contest:
    """Update the view after a claim that succeeded. `former` is the previous term, read again after the claim.

    If it has changed, its holder was alive: it notices the new term at its next renewal, or lapses.
    """
    starts = begun if former == contest.seen else at + LASTS_S
    return Contest(mine, begun, begun, mine.number, starts, begun + HOLDS_S)


def after_renewal(contest: Contest, begun: float, ended: float, *, newest: int) -> Contest:
    """Update the view after a renewal; `newest` is the newest term after it."""
    if newest != contest.mine or contest.lapsed(begun):
        return replace(contest, mine=0, until=NEVER, looked=NEVER)
    if ended - begun > WITHIN_S:
        return contest
    return replace(contest, until=begun + HOLDS_S)


# The files.
class Terms:
    """The files of the terms, below the directory of the state. Every method blocks while the volume hangs."""

    def __init__(self, base: Path) -> None:
        self.directory = base / LEASE

    def newest(self) -> Term | None:
        found = self.last()
        return self.term(found) if found else None

    def last(self) -> int:
        return max(self._numbers(), default=0)

    def term(self, wanted: int) -> Term | None:
        text = read_plain(self._file(wanted), 4096)
        if text is None:
            return Term(wanted) if os.path.lexists(self._file(wanted)) else None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        data = data if isinstance(data, dict) else {}
        return Term(wanted, text, str(data.get("holder", "")), str(data.get("life", "")), data.get("released") is True,
                    data.get("alone") is True, data.get("serves") is True, str(data.get("heir", "")))  # fmt: skip

    def claim(self, wanted: int, holder: str, life: str, *, alone: bool = False) -> Term | None:
        """Create a term; None if another pod has it. OSError from a volume that cannot link files."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self.directory / f".{os.urandom(8).hex()}"
        try:
            write_whole(temporary, _content(holder, life, 0, alone=alone), 0o600)
            os.link(temporary, self._file(wanted))
        except FileExistsError:
            return None
        finally:
            with suppress(OSError):
                temporary.unlink()
        sync(self.directory)
        self._prune(wanted)
        return self.term(wanted)

    def renew(
        self, mine: int, holder: str, life: str, beat: int, *, released: bool = False, serves: bool = False,
        heir: str = "",
    ) -> None:  # fmt: skip
        """Write the file of an own term. The term of another pod is never written."""
        rewrite(self._file(mine), _content(holder, life, beat, released=released, serves=serves, heir=heir))

    def _file(self, wanted: int) -> Path:
        return self.directory / f"term-{wanted}"

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.directory)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return []
        return [number(match[1]) or 0 for name in names if (match := _NAME.fullmatch(name))]

    def _prune(self, newest: int) -> None:
        for old in self._numbers():
            if old <= newest - KEPT:
                self._file(old).unlink(missing_ok=True)


def _content(
    holder: str, life: str, beat: int, *, released: bool = False, alone: bool = False, serves: bool = False,
    heir: str = "",
) -> bytes:  # fmt: skip
    content: dict[str, object] = {"holder": holder, "life": life, "beat": beat, "released": released, "alone": alone,
                                  "serves": serves, "heir": heir}  # fmt: skip
    return json.dumps(content).encode().ljust(LENGTH) + b"\n"


def sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
