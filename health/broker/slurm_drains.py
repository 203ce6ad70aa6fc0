"""Drains that Slurm sets by itself and never lifts, and the jobs without slurmstepd that lead to one.

`judge` recognises such a drain and decides when the broker lifts it. `find_dead_jobs` finds jobs whose slurmstepd the
kernel killed because the job's files in /dev/shm hold all of its memory: killing the job's processes does not free such
files, so the kernel goes on to its slurmstepds. Nothing reports the end of the job then: Slurm notices after many
minutes, and runs it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from health.broker.decide import REASON_LIMIT, Act, BrokerNode
from init.slurm.node import BACK

AGAIN_S = 30.0  # interval of looks at such a drain
SOON_S = 5.0  # delay after a message of slurmstepd or of a failed script, before the drain reaches slurmctld
EXPECTED_S = 120.0  # time to wait for a drain after that message
MOST, WITHIN_S = 3, 6 * 3600.0  # a fault that returns more often is left to a person
STILL = " - still: "
WAY_OUT = "a person ends it: scontrol update nodename={} state=resume"


@dataclass(frozen=True, slots=True)
class SlurmDrainCause:
    pattern: re.Pattern[str]
    author: str  # slurmstepd's requests come from root; slurmctld's own from SlurmUser
    clean_s: float  # time that the node must be clean
    kill: bool = False


# A script that fails is not fixed by a lift: its drain waits longer, so that few jobs meet the script again.
CAUSES = (
    SlurmDrainCause(
        re.compile(r"(Kill task failed|Job step not running)( \(JobId=\d+ [^()]*\))?"), "root", 30.0, kill=True
    ),
    SlurmDrainCause(re.compile("SlurmdSpoolDir is full"), "root", 60.0),
    SlurmDrainCause(re.compile("batch job complete failure"), "slurm", 60.0),
    # A killed slurmctld started a job that it had not saved as running; the node refused the second start.
    SlurmDrainCause(re.compile("Duplicate jobid"), "slurm", 30.0),
    SlurmDrainCause(re.compile("Prolog error|Epilog error|Job env setup error"), "slurm", 600.0),
    # slurmctld reuses the reason of a pod's return for a drain of its own; a person's drain has another reason.
    SlurmDrainCause(re.compile(re.escape(BACK)), "root", 600.0),
)


@dataclass(frozen=True, slots=True)
class Unkilled:
    """A step that Slurm could not kill, or several of one drain.

    slurmstepd may announce a step twice: in Slurm 24.11 an end that meets a SIGKILL starts its monitor twice, and the
    second one, which finds no process any more, announces the step after the first one has drained the node.
    """

    job: int
    first_at: float
    last_at: float
    processes: tuple[tuple[int, str], ...]  # pid and start
    before: BrokerNode | None  # the node just before Slurm drained it; None: slurmctld did not answer


@dataclass(frozen=True, slots=True)
class SlurmDrainWatch:
    """The broker's memory of Slurm's own drains."""

    unkilled: Unkilled | None = None
    clean_since: float = 0.0  # by the steady clock, like all times here
    posted: str = ""  # the reason that the broker gave to the current drain
    lifts: tuple[float, ...] = ()


def counts_as_relapse(watch: SlurmDrainWatch) -> bool:
    """Tell if a lift of the current drain counts against the node: not if no process was left at any announcement."""
    return watch.unkilled is None or bool(watch.unkilled.processes)


@dataclass(frozen=True, slots=True)
class Remains:
    """Reasons why the node is not clean: processes that do not end, and a full spool directory."""

    hanging: tuple[str, ...] = ()
    spool: str = ""

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (*self.hanging, self.spool)))


def find_cause(node: BrokerNode) -> SlurmDrainCause | None:
    words, is_ours, _ = node.reason.partition(STILL)
    for cause in CAUSES:
        if node.drained and node.author == ("root" if is_ours else cause.author) and cause.pattern.fullmatch(words):
            return cause
    return None


def judge(
    cause: SlurmDrainCause, node: BrokerNode, remains: Remains, watch: SlurmDrainWatch, now: float, name: str = "NODE"
) -> Act:
    """Decide about a drain by Slurm itself: clear, update, or nothing with the reason to wait."""
    way_out = WAY_OUT.format(name)
    words = node.reason.partition(STILL)[0]
    if cause.kill:
        if not is_recorded(node, watch):
            return Act(
                "nothing", f"{node.reason}: the broker did not record the node's state before this drain; {way_out}"
            )
        if watch.unkilled and watch.unkilled.before and watch.unkilled.before.drained:
            return Act("update", watch.unkilled.before.reason or "drained before Slurm's own drain")
    if obstacle := remains.text:
        text = plain(f"{words}{STILL}{obstacle}")
        return Act("nothing" if text == node.reason else "update", text)
    if sum(1 for at in watch.lifts if now - at < WITHIN_S) >= MOST:
        return Act("nothing", f"{words}: lifted {MOST} times in {WITHIN_S / 3600:g} hours, and it came back; {way_out}")
    if not watch.clean_since or now - watch.clean_since < cause.clean_s:
        return Act(
            "nothing",
            f"{words}: the node is clean; the broker lifts the drain after {cause.clean_s:g} s without a relapse",
        )
    return Act("clear", f"{words}: nothing of it is left")


def plain(text: str) -> str:
    """Make one line without quotes: users choose the names of processes."""
    return re.sub(r"[^ -~]|[\"'`|\\]", " ", text)[:REASON_LIMIT].strip()


def is_recorded(node: BrokerNode, watch: SlurmDrainWatch) -> bool:
    """Tell if this very drain is the one that slurmstepd announced: a person may use the same words."""
    unkilled = watch.unkilled
    if unkilled is None or unkilled.before is None:
        return False
    if watch.posted and node.reason == watch.posted:
        return True
    # Slurm reports whole seconds.
    return node.since is not None and unkilled.first_at - 2.0 <= node.since <= unkilled.last_at + EXPECTED_S


SOCKETS = Path("/proc/net/unix")
LISTENS = "00010000"  # __SO_ACCEPTCON
BATCH, EXTERN = "4294967291", "4294967292"
DEAD_LOOK_S = 5.0
DEAD_S = 15.0  # a slurmstepd that starts has no socket that listens yet
DEAD_AGAIN_S = 60.0  # slurmctld did not answer
DEAD_OVER_S = 3600.0  # the job has ended; slurmd removes its sockets when it pleases
# Of version 1 and of version 2, below /sys/fs/cgroup; slurmstepd's processes are inside.
JOB_CGROUPS = ("memory/slurm*/uid_*/job_{}", "system.slice/*slurmstepd.scope/job_{}")
KILLS = ("memory.oom_control", "memory.events")
USED = (("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max"))
FULL = 0.5  # share of the limit that is still held after the kernel has killed the processes


@dataclass(frozen=True, slots=True)
class Dead:
    """A job whose script or step has lost its slurmstepd."""

    job: int
    alone: bool  # no slurmstepd of it lives here


def find_dead_jobs(spool: Path, node: str, sockets: Path = SOCKETS) -> dict[int, Dead]:
    """Return the jobs whose slurmstepds were killed: their sockets remain, and no process listens on them.

    A job whose batch script still has its slurmstepd is left alone: the script's end is reported.
    """
    steps = _list_steps(spool, node)
    living = _list_listening(sockets, spool) if steps else None
    if living is None:
        return {}
    dead = {}
    for job, names in steps.items():
        batch = {name for name, step in names.items() if step == BATCH}
        work = {name for name, step in names.items() if step != EXTERN}
        if work - living and not batch & living:
            dead[job] = Dead(job, alone=not living & set(names))
    return dead


def find_full_limit(job: int, root: Path) -> int:
    """Return the job's limit in bytes if it is still full after the kernel killed the job's processes, else 0."""
    for directory in _list_cgroups(job, root):
        for used, limit in USED:
            most = _read_number(directory / limit)
            is_full = most and _read_number(directory / used) >= FULL * most
            if is_full and any(_has_kills(Path(place)) for place, _, _ in os.walk(directory)):
                return most
    return 0


def format_dead_reason(limit: int) -> str:
    return (
        f"minivm: the job was over its memory limit of {limit >> 20} MiB, and its files in /dev/shm count:"
        " submit with a larger --mem"
    )


def end_processes(job: int, root: Path) -> None:
    """Kill what is left in the job's cgroups: without a slurmstepd nothing else does, and no process leaves them."""
    for directory in _list_cgroups(job, root):
        for place, _, _ in os.walk(directory):
            for pid in _read_text(Path(place) / "cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)


def _list_cgroups(job: int, root: Path) -> list[Path]:
    return [directory for pattern in JOB_CGROUPS for directory in root.glob(pattern.format(job))]


def _list_steps(spool: Path, node: str) -> Mapping[int, dict[str, str]]:
    """Map each job with sockets in slurmd's directory to the names of those, and each of them to its step."""
    steps: dict[int, dict[str, str]] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(spool):
            job, dot, step = entry.name.removeprefix(f"{node}_").partition(".")
            is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
            if is_socket and entry.name.startswith(f"{node}_") and dot and job.isdecimal():
                steps.setdefault(int(job), {})[entry.name] = step.partition(".")[0]
    return steps


def _list_listening(sockets: Path, spool: Path) -> set[str] | None:
    """Return the names of the files in `spool` on which a process listens; None: the kernel does not say.

    Any user may listen on a socket of the same name in another directory, or on one without a file.
    """
    lines = _read_text(sockets).splitlines()[1:]
    cells = (line.split(None, 7) for line in lines)
    paths = (os.path.split(os.path.normpath(row[7])) for row in cells if len(row) == 8 and row[3] == LISTENS)
    places = {os.path.normpath(spool), os.path.realpath(spool)}
    return {name for place, name in paths if place in places} if lines else None


def _has_kills(place: Path) -> bool:
    for name in KILLS:
        for line in _read_text(place / name).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.isdecimal() and int(count):
                return True
    return False


def _read_number(path: Path) -> int:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
