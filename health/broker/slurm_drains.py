"""Drains that Slurm sets by itself and never lifts: how to recognise them, and when the broker lifts one. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """A step that Slurm could not kill."""

    job: int
    at: float
    processes: tuple[tuple[int, str], ...]  # pid and start
    before: BrokerNode | None  # the node just before Slurm drained it; None: slurmctld did not answer


@dataclass(frozen=True, slots=True)
class SlurmDrainWatch:
    """The broker's memory of Slurm's own drains."""

    unkilled: Unkilled | None = None
    clean_since: float = 0.0  # by the steady clock, like all times here
    posted: str = ""  # the reason that the broker gave to the current drain
    lifts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Remains:
    """Reasons why the node is not clean: processes that do not end, and a full spool directory."""

    hanging: tuple[str, ...] = ()
    spool: str = ""

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (*self.hanging, self.spool)))


def cause_of(node: BrokerNode) -> SlurmDrainCause | None:
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
        if not _is_recorded(node, watch):
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


def _is_recorded(node: BrokerNode, watch: SlurmDrainWatch) -> bool:
    """Tell if this very drain is the one that slurmstepd announced: a person may use the same words."""
    unkilled = watch.unkilled
    if unkilled is None or unkilled.before is None:
        return False
    if watch.posted and node.reason == watch.posted:
        return True
    # Slurm reports whole seconds.
    return node.since is not None and -2.0 <= node.since - unkilled.at <= EXPECTED_S
