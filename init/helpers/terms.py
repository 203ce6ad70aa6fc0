"""slurmctld's state, a directory for each term of leadership: `term-N` below the mounted StateSaveLocation.

The new holder copies the newest term into its own and publishes the copy by rename; its slurmctld alone uses that path.
A former slurmctld that was stopped and wakes up writes into a directory that no controller reads any more.

Scripts and environments of jobs are written once and never changed: they are linked, which costs no room. slurmctld
rewrites every other file, some of them in place (`clustername`, `dbd.messages`, `crontab/*`): those are copied.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from errno import ECANCELED
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ground.files import write_json
from init.errors import InitError
from init.fields import number
from init.pod.pod import Pod
from init.slurm.place import HELD, LEASE, base, of_term
from init.state import lease

KEPT = 3
_TERM = re.compile(r"term-([1-9][0-9]{0,8})", re.ASCII)
_JOB = re.compile(r"hash\.[0-9]+/job\.[0-9]+", re.ASCII)
_UNCHANGING = ("script", "environment")


class StateError(InitError):
    """The state of a new term cannot be made now."""


def terms(parent: Path) -> list[int]:
    """Return the published terms, the newest last."""
    try:
        names = os.listdir(parent)  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return []
    return sorted(number(match[1]) or 0 for name in names if (match := _TERM.fullmatch(name)))


def build(parent: Path, term: int, is_held: Callable[[], bool] = lambda: True) -> str:
    """Make the directory of a term from the newest one before it, and return how. Safe to repeat after any cut.

    It gives up once the term is no longer held.
    """
    target = of_term(parent, term)
    for left in parent.glob(".term-*"):
        shutil.rmtree(left, ignore_errors=True)
    if target.is_dir():
        return f"{target} is there"
    began = time.monotonic()
    before = [other for other in terms(parent) if other < term]
    source = of_term(parent, before[-1]) if before else parent
    partial = parent / f".term-{term}.{os.urandom(4).hex()}"
    try:
        copied, linked = _copy(source, partial, is_held, outermost=not before)
        _sync_all(parent)
        _check_held(partial, is_held)
        partial.rename(target)
        lease.sync(parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StateError(f"make {target}", error.strerror or str(error), hint="it is tried again") from error
    for old in terms(parent)[:-KEPT]:
        shutil.rmtree(of_term(parent, old), ignore_errors=True)
    took = f"{copied} files copied, {linked} linked in {time.monotonic() - began:.1f} s"
    return f"{target} from {source}: {took}"


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


def become_single(parent: Path, name: str, pause: float = 0.2) -> int:
    """Take a term for a cluster that has one controller again, and return it; 0 if it never had several.

    Waits until no other pod has the lease.
    """
    store, contest = lease.Terms(parent), lease.Contest()
    life = f"{name}-{os.urandom(8).hex()}"
    while True:
        begun = lease.now()
        contest = lease.after_look(contest, store.newest(), begun, lease.now())
        if contest.seen is None:
            return 0
        if contest.seen.alone:
            return contest.seen.number
        term = lease.next_term(contest, life, lease.now(), first=True)
        if term and store.claim(term, name, life, alone=True):
            if store.term(term - 1) != contest.seen:
                time.sleep(lease.LASTS_S)
            return term
        time.sleep(pause)


def main(words: list[str]) -> int:
    """Make the directory of a term for a controller that is alone. Of several the service `lease` makes it."""
    pod = Pod(os.environ)
    if words != ["alone"]:
        print("usage: python3 -I -m init.helpers.terms alone", file=sys.stderr)
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
