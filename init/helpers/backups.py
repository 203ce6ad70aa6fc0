"""Make the periodic copies of a controller's state or of accounting's records, and prove each: `init.helpers.backups`.

MINIVM_BACKUP_EVERY is the interval (24h; 0: none), MINIVM_BACKUP_KEEP the number of copies. Runs every few minutes and
decides by the newest copy's age, so a pod that restarts neither skips a copy nor makes too many. On failure the exit
code is 1, and the only line is the reason for the pod's degraded state.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from init.errors import ConfigError, InitError
from init.fields import duration, number
from init.places import SOCKET
from init.pod.client import Client, service
from init.pod.pod import Pod
from init.slurm.place import BACKUPS
from init.state import copies, prove, save

DAY, KEEP = "24h", "7"
FIRST_AFTER = 600.0  # seconds of the pod's life: a boot has other work, and a new cluster nothing to copy


def is_due(now: float, every: float, copied_at: float, up: float) -> bool:
    """Tell if a copy is due. A copy with a time in the future, made before the clock was set back, does not count."""
    return every > 0 and up >= FIRST_AFTER and not 0 <= now - copied_at < every


def settings(pod: Pod) -> tuple[float, int]:
    every_text, keep_text = pod.setting("MINIVM_BACKUP_EVERY", DAY), pod.setting("MINIVM_BACKUP_KEEP", KEEP)
    every, keep = duration(every_text), number(keep_text)
    if every is None:
        raise ConfigError(
            "schedule copies of the state",
            f"found {every_text!r}, expected a duration",
            field="MINIVM_BACKUP_EVERY",
            hint="such as 24h; 0 for none",
        )
    if not keep:
        raise ConfigError(
            "schedule copies of the state",
            f"found {keep_text!r}, expected a number from 1 on",
            field="MINIVM_BACKUP_KEEP",
        )
    return every, keep


def main() -> int:
    pod, directory = Pod(os.environ), Path(BACKUPS)
    try:
        every, keep = settings(pod)
        summary = copies.summarize(directory)
        if every and is_due(time.time(), every, summary.made, _measure_uptime()) and (daemon := _find_ready_daemon()):
            os.nice(19)
            _copy(pod, directory, keep, records_only=daemon == "slurmdbd")
            summary = copies.summarize(directory)
        if every:
            copies.publish_summary(summary)
    except InitError as error:
        print(error)
        return 1
    if summary.failed:
        print(f"the copy {summary.newest} of the state cannot be restored: {summary.failed}")
    return 1 if summary.failed else 0


def _copy(pod: Pod, directory: Path, keep: int, *, records_only: bool) -> None:
    manifest = save.save(pod, directory, keep, records_only=records_only)
    try:
        with save.only_one(directory):
            prove.prove(pod, directory, manifest)
    except prove.NotHere as error:
        print(error, file=sys.stderr)


def _find_ready_daemon() -> str:
    """Return the daemon whose state is copied, slurmctld or in the accounting pod slurmdbd; "" if it is not ready.

    A copy of what keeps the daemon from starting would push good copies out.
    """
    with Client() as client:
        daemon = service(client, "slurmctld") or service(client, "slurmdbd")
    return daemon.name if daemon is not None and daemon.ready else ""


def _measure_uptime() -> float:
    return time.time() - Path(SOCKET).stat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
