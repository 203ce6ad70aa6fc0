"""Refuse to start slurmctld with a state that would lose the jobs which another one has. Reads only.

slurmctld starts without any job from an absent or empty job_state, and says so in its log alone. It refuses another
cluster's state itself, and is started twenty times before the pod ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from ground.files import read_plain
from init.errors import ConfigError
from init.fields import number
from init.pod import release as slurm
from init.pod.pod import Pod
from init.slurm.conf import setting
from init.slurm.place import (
    ACCEPTED,
    BACKUPS,
    CONFIGURATION,
    JOBS,
    JOURNAL,
    NEW,
    OLD,
    WHOLE_HEAD,
    has_head,
    known,
    state_of,
)

START = "start slurmctld"
# The pod's own claim, where the state is on another one.
OWN_STATE = "/mnt/minivm/own-state"
# What moving the state leaves behind (docs/how-to/two-controllers.md).
MOVED = "moved-to-another-claim"


def run(pod: Pod) -> str:
    conf = pod.text(CONFIGURATION) or ""
    state = state_of(pod)
    if not state.is_dir():
        return "there is no state yet"
    if os.path.lexists(state / JOURNAL):
        from init.state.restore import pending

        hint = f"finish it: minivm state restore {pending(state)}"
        raise ConfigError(START, "a restore of its state was cut", file=str(state / JOURNAL), hint=hint)
    cluster = setting(conf, "ClusterName")
    _check_cluster(pod, state, cluster)
    return _check_jobs(pod, state, cluster)


def _check_cluster(pod: Pod, state: Path, cluster: str) -> None:
    file = state / "clustername"
    owner = (read_plain(file, 512) or b"").decode(errors="replace").strip().partition("|")[0]
    if owner and cluster and owner.lower() != cluster.lower():
        problem = f"found the state of the cluster {owner!r}, expected {cluster!r}"
        hint = f"mount that cluster's own volume, or set clusterName: {owner}; {way_back(pod, cluster)}"
        raise ConfigError(START, problem, file=str(file), hint=hint)


def _check_jobs(pod: Pod, state: Path, cluster: str) -> str:
    file = state / JOBS
    head = read_plain(file, WHOLE_HEAD)
    if head is None and _has_jobs(state):
        return "slurmctld reads the state that was saved before"
    if head is not None:
        if known(pod) is None or has_head(head):
            (state / ACCEPTED).unlink(missing_ok=True)  # it was for one start
            return "the state is this cluster's"
        problem = "found an empty file" if not head else "found a damaged file"
        hint = (
            f"{way_back(pod, cluster)}; or to start without any job: move that file away, then minivm state accept-loss"
        )
        raise ConfigError(START, f"{problem}, expected the cluster's jobs", file=str(file), hint=hint)
    if os.path.lexists(state / ACCEPTED):
        return "there are no jobs in the state, as an operator accepted"
    _check_claim(pod, state)
    lost = _newest(pod, cluster, with_jobs=True)
    if lost:
        problem = f"found no file, and the copy {lost} has unfinished jobs"
        hint = (
            f"minivm stop slurmctld && minivm state restore {lost}; or to start without them: minivm state accept-loss"
        )
        raise ConfigError(START, problem, file=str(file), hint=hint)
    return "there are no jobs yet"


def _check_claim(pod: Pod, state: Path) -> None:
    """Refuse an empty state on one claim while the jobs are on another. The chart cannot see it without a cluster."""
    for directory in (state, state.parent):  # of several controllers each term has a directory below
        if os.path.lexists(directory / MOVED):
            problem = "the state was moved to another claim"
            hint = "name it in controller.persistence.existingClaim; or to start without any job: remove that file"
            raise ConfigError(START, problem, file=str(directory / MOVED), hint=hint)
    own = pod.path(OWN_STATE)
    if _has_jobs(own):
        problem = f"found no file, and the pod's own claim has one ({own / JOBS})"
        hint = "move the state (docs/how-to/two-controllers.md); or to start without any job: minivm state accept-loss"
        raise ConfigError(START, problem, file=str(state / JOBS), hint=hint)


def _has_jobs(state: Path) -> bool:
    return any(os.path.lexists(state / f"{JOBS}{end}") for end in ("", NEW, OLD))


def way_back(pod: Pod, cluster: str) -> str:
    """Name the newest good copy and the command, for a person."""
    name = _newest(pod, cluster)
    return f"minivm stop slurmctld && minivm state restore {name}" if name else "there is no good copy of its state"


def _newest(pod: Pod, cluster: str, *, with_jobs: bool = False) -> str:
    directory = pod.path(BACKUPS)
    if not directory.is_dir():
        return ""
    from init.state import copies  # imported late: a start without trouble reads no copy

    release = known(pod)
    reads = range(release.reads, release.protocol + 1) if release else None
    manifest = copies.newest_good(directory, cluster, reads)
    return manifest.name if manifest and (manifest.unfinished or not with_jobs) else ""


# Checks before slurmctld and slurmdbd start: may they take over an earlier Slurm's state? Reads only.


# slurmdbd records the message version of each controller that has connected.
QUESTION = "SELECT MAX(rpc_version) FROM cluster_table WHERE deleted = 0"


def check_release(pod: Pod) -> str:
    """Check slurmctld's state, at the path in the installed slurm.conf."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmctld checks its state itself"
    directory = state_of(pod)
    # The volume belongs to the Slurm user, who may have put anything there.
    files = (*slurm.HEADED, *slurm.BARE)
    headers = {name: read_plain(directory / name, slurm.HEADER) or b"" for name in files}
    written_by = slurm.written_by(headers)
    _refuse(release, written_by, "slurmctld's state", pod)
    return "no state yet" if written_by is None else f"the state is of Slurm {release.called(written_by)}"


def records(pod: Pod) -> str:
    """Check that the cluster's records are in this database, and not moved elsewhere."""
    from init.state import move

    return move.guard(pod)


def accounting(pod: Pod) -> str:
    """Check the accounting database; if it does not answer now, slurmdbd waits for it."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmdbd checks its database itself"
    from init.slurm.accounting import CONFIGURATION as DATABASE
    from init.slurm.accounting import ask

    answer = number(ask(pod.text(DATABASE) or "", QUESTION))
    served = answer >> 8 if answer else None
    _refuse(release, served, "the accounting database")
    return "no controller is known to it" if served is None else f"it served Slurm {release.called(served)}"


def _refuse(release: slurm.Release, left: int | None, what: str, pod: Pod | None = None) -> None:
    reason, hint = slurm.refusal(release, left, what)
    if reason and pod is not None:
        hint = f"{hint}; {way_back(pod, setting(pod.text(CONFIGURATION) or '', 'ClusterName'))}"
    if reason:
        raise ConfigError(f"start Slurm {release.name}", reason, hint=hint)
