"""Checks before slurmctld and slurmdbd start: may they take over an earlier Slurm's state? Reads only."""

from __future__ import annotations

from ground.files import read_plain
from init.errors import ConfigError
from init.fields import number
from init.pod import release as slurm
from init.pod.pod import Pod
from init.slurm.conf import setting
from init.slurm.saved import CONFIGURATION, STATE, known

# slurmdbd records the message version of each controller that has connected.
QUESTION = "SELECT MAX(rpc_version) FROM cluster_table WHERE deleted = 0"


def run(pod: Pod) -> str:
    """Check slurmctld's state, at the path in the installed slurm.conf."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmctld checks its state itself"
    directory = pod.path(setting(pod.text(CONFIGURATION) or "", "StateSaveLocation") or STATE)
    # The volume belongs to the Slurm user, who may have put anything there.
    files = (*slurm.HEADED, *slurm.BARE)
    headers = {name: read_plain(directory / name, slurm.HEADER) or b"" for name in files}
    left = slurm.written_by(headers)
    _refuse(release, left, "slurmctld's state", pod)
    return "no state yet" if left is None else f"the state is of Slurm {release.called(left)}"


def accounting(pod: Pod) -> str:
    """Check the accounting database; if it does not answer now, slurmdbd waits for it."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmdbd checks its database itself"
    from init.slurm.accounting import CONFIGURATION as DATABASE
    from init.slurm.accounting import ask

    answer = number(ask(pod.text(DATABASE) or "", QUESTION))
    left = answer >> 8 if answer else None
    _refuse(release, left, "the accounting database")
    return "no controller is known to it" if left is None else f"it served Slurm {release.called(left)}"


def _refuse(release: slurm.Release, left: int | None, what: str, pod: Pod | None = None) -> None:
    reason, hint = slurm.refusal(release, left, what)
    if reason and pod is not None:
        from init.prepare.state_guard import way_back

        hint = f"{hint}; {way_back(pod, setting(pod.text(CONFIGURATION) or '', 'ClusterName'))}"
    if reason:
        raise ConfigError(f"start Slurm {release.name}", reason, hint=hint)
