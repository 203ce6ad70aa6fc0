"""The lease on the right to act as the controller: one active pod out of several, on the volume of the state itself.

Each **term** of leadership is a file `lease/term-N` that its holder alone creates and renews. Creating it by `link`
succeeds for one pod only, on NFS too, so a term never has two holders, whatever the clocks do and whichever pod was
stopped meanwhile. No lock is held: a stopped process could never release it.

Time decides only *when* a pod may create the next term. No clocks of two machines are compared, as in
`fleet.act.leader_election`: a contender measures by its own clock for how long the newest term's file has not changed;
the holder measures from the beginning of the renewal. All times here are of CLOCK_BOOTTIME, which also counts while the
machine is suspended. A hold that has lapsed is never renewed: the pod contends for a new term.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from errno import ECANCELED
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ground.files import read_plain, rewrite, sync_directory, write_json, write_whole
from init.errors import InitError
from init.fields import number
from init.lean import record, replace
from init.pod.pod import Pod
from init.slurm.place import HELD, LEASE, base, find_term_directory

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
KEPT_FILES = 5  # of former terms
PAUSE_S = 0.2  # between two looks of a controller that becomes the only one
LENGTH = 511  # of a file without its newline: a block of the disk, which is written whole
_TERM = re.compile(r"term-([1-9][0-9]{0,8})", re.ASCII)


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
def update_after_look(contest: Contest, newest: Term | None, begun: float, ended: float) -> Contest:
    """Update the view after a look at the newest term. A change happened before the look ended, at the latest."""
    if contest.mine and (newest is None or newest.number != contest.mine):
        contest = replace(contest, mine=0, until=NEVER)
    same = contest.looked != NEVER and newest == contest.seen
    return replace(contest, seen=newest, since=contest.since if same else ended, looked=begun)


def choose_term(contest: Contest, life: str, at: float, *, first: bool, holder: str = "") -> int:
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


def update_after_claim(contest: Contest, mine: Term, former: Term | None, begun: float, at: float) -> Contest:
    """Update the view after a claim that succeeded. `former` is the previous term, read again after the claim.

    If it has changed, its holder was alive: it notices the new term at its next renewal, or lapses.
    """
    starts = begun if former == contest.seen else at + LASTS_S
    return Contest(mine, begun, begun, mine.number, starts, begun + HOLDS_S)


def update_after_renewal(contest: Contest, begun: float, ended: float, *, newest: int) -> Contest:
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
        term = self.last()
        return self.term(term) if term else None

    def last(self) -> int:
        return max(terms(self.directory), default=0)

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
        sync_directory(self.directory)
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

    def _prune(self, newest: int) -> None:
        for old in terms(self.directory):
            if old <= newest - KEPT_FILES:
                self._file(old).unlink(missing_ok=True)


def _content(
    holder: str, life: str, beat: int, *, released: bool = False, alone: bool = False, serves: bool = False,
    heir: str = "",
) -> bytes:  # fmt: skip
    content: dict[str, object] = {"holder": holder, "life": life, "beat": beat, "released": released, "alone": alone,
                                  "serves": serves, "heir": heir}  # fmt: skip
    return json.dumps(content).encode().ljust(LENGTH) + b"\n"


# slurmctld's state, a directory for each term of leadership: `term-N` below the mounted StateSaveLocation.
#
# The new holder closes the newest term, copies it into its own and publishes the copy by rename; its slurmctld alone
# uses that path. A former slurmctld that was stopped and wakes up finds submissions in its sockets. It can accept none
# that the copy lacks: it makes a job's directory before it answers, and may not any more.
#
# Scripts and environments of jobs are written once and never changed: they are linked, which costs no room. slurmctld
# rewrites every other file, some of them in place (`clustername`, `dbd.messages`, `crontab/*`): those are copied.


KEPT_STATES = 3  # directories of former terms
_JOB = re.compile(r"hash\.[0-9]+/job\.[0-9]+", re.ASCII)
_UNCHANGING = ("script", "environment")


class StateError(InitError):
    """The state of a new term cannot be made now."""


def terms(parent: Path) -> list[int]:
    """Return the terms that have a file or a published directory here, the newest last."""
    try:
        names = os.listdir(parent)  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return []
    return sorted(number(match[1]) or 0 for name in names if (match := _TERM.fullmatch(name)))


def build(parent: Path, term: int, is_held: Callable[[], bool] = lambda: True) -> str:
    """Make the directory of a term from the newest one before it, and return how. Safe to repeat after any cut.

    It gives up once the term is no longer held.
    """
    target = find_term_directory(parent, term)
    for leftover in parent.glob(".term-*"):
        # The holder of a later term may be copying while this one still goes on: its copy stays.
        of = leftover.name.removeprefix(".term-").partition(".")[0]
        if (number(of) or 0) <= term:
            shutil.rmtree(leftover, ignore_errors=True)
    if target.is_dir():
        return f"{target} is there"
    began = time.monotonic()
    before = [other for other in terms(parent) if other < term]
    source = find_term_directory(parent, before[-1]) if before else parent
    partial = parent / f".term-{term}.{os.urandom(4).hex()}"
    try:
        _check_held(partial, is_held)
        if before:
            _set_mode(source, 0o500)  # its slurmctld makes no file any more, and refuses submissions
        copied, linked = _copy(source, partial, is_held, outermost=not before)
        _sync_all(parent)
        _check_held(partial, is_held)
        partial.rename(target)
        sync_directory(parent)
        if before:
            source.chmod(0)  # a slurmctld that wakes up launches no job: it reads the script first
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StateError(f"make {target}", error.strerror or str(error), hint="it is tried again") from error
    for old in terms(parent)[:-KEPT_STATES]:
        with suppress(OSError):
            _set_mode(find_term_directory(parent, old), 0o700)
        shutil.rmtree(find_term_directory(parent, old), ignore_errors=True)
    took = f"{copied} files copied, {linked} linked in {time.monotonic() - began:.1f} s"
    return f"{target} from {source}: {took}"


def _set_mode(state: Path, mode: int) -> None:
    state.chmod(mode)
    for digit in range(10):
        with suppress(FileNotFoundError):
            (state / f"hash.{digit}").chmod(mode)


def _check_held(partial: Path, is_held: Callable[[], bool]) -> None:
    if not is_held():
        raise OSError(ECANCELED, "the term was lost meanwhile", str(partial))


def _copy(source: Path, target: Path, is_held: Callable[[], bool], *, outermost: bool) -> tuple[int, int]:
    """Copy a directory to which its former slurmctld may still write; skip a file that has gone meanwhile."""
    copied = linked = 0
    target.mkdir(mode=0o700)
    waiting = [Path()]
    while waiting:
        below = waiting.pop()
        _check_held(target, is_held)
        scripts = _JOB.fullmatch(str(below)) is not None
        try:
            entries = list(os.scandir(source / below))
        except FileNotFoundError:
            continue
        for entry in entries:
            if outermost and below == Path() and _is_own(entry.name):
                continue
            place = below / entry.name
            try:
                status = entry.stat(follow_symlinks=False)
                if S_ISDIR(status.st_mode):
                    (target / place).mkdir(mode=0o700)
                    waiting.append(place)
                elif not S_ISREG(status.st_mode):
                    continue
                elif scripts and entry.name in _UNCHANGING:
                    os.link(entry.path, target / place, follow_symlinks=False)
                    linked += 1
                else:
                    shutil.copy2(entry.path, target / place, follow_symlinks=False)
                    copied += 1
            except FileNotFoundError:
                continue
    return copied, linked


def _is_own(name: str) -> bool:
    return name.startswith(".") or name == LEASE or _TERM.fullmatch(name) is not None


def _sync_all(directory: Path) -> None:
    """Write the volume's files to its disk: one call instead of one for each of a hundred thousand files."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            number_ = ctypes.get_errno()
            raise OSError(number_, os.strerror(number_))
    finally:
        os.close(fd)


def become_single(parent: Path, name: str) -> int:
    """Take a term for a cluster that has one controller again, and return it; 0 if it never had several.

    Waits until no other pod has the lease.
    """
    store, contest = Terms(parent), Contest()
    life = f"{name}-{os.urandom(8).hex()}"
    while True:
        begun = now()
        contest = update_after_look(contest, store.newest(), begun, now())
        if contest.seen is None:
            return 0
        if contest.seen.alone:
            return contest.seen.number
        term = choose_term(contest, life, now(), first=True)
        if term and store.claim(term, name, life, alone=True):
            if store.term(term - 1) != contest.seen:
                time.sleep(LASTS_S)
            return term
        time.sleep(PAUSE_S)


def main(words: list[str]) -> int:
    """Make the directory of a term for a controller that is alone. Of several the service `lease` makes it."""
    pod = Pod(os.environ)
    if words != ["alone"]:
        print("usage: python3 -I -m init.state.lease alone", file=sys.stderr)
        return 2
    try:
        term = become_single(base(pod), pod.name)
        if term:
            write_json(pod.path(HELD), {"term": term})
            print(build(base(pod), term), flush=True)
    except (InitError, OSError) as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
