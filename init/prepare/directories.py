"""The directories that the daemons insist on, with the owner and mode without which they exit."""

from __future__ import annotations

import os
from pathlib import Path

from init.pod.pod import Pod, PrepareError, user

# Path, mode, owner, and the program for whose sake it exists ("" for always).
TABLE = (
    ("/run/minivm", 0o755, "root", ""),
    ("/run/minivm/env", 0o700, "root", ""),
    ("/run/minivm/verdicts", 0o755, "root", ""),
    ("/var/lib/minivm", 0o755, "root", ""),
    ("/etc/slurm", 0o755, "root", ""),
    # munged refuses 0700 and 0777 for the socket's directory, and a key that others may reach.
    ("/etc/munge", 0o700, "munge", "/usr/sbin/munged"),
    ("/run/munge", 0o755, "munge", "/usr/sbin/munged"),
    ("/var/lib/munge", 0o711, "munge", "/usr/sbin/munged"),
    ("/var/log/munge", 0o700, "munge", "/usr/sbin/munged"),
    ("/run/slurm", 0o755, "slurm", ""),
    ("/var/log/slurm", 0o755, "slurm", ""),
    ("/var/spool/slurmctld", 0o700, "slurm", "/usr/sbin/slurmctld"),
    ("/var/spool/slurmd", 0o755, "root", "/usr/sbin/slurmd"),
    ("/run/mysqld", 0o755, "mysql", "/usr/sbin/mariadbd"),
    ("/var/lib/mysql", 0o700, "mysql", "/usr/sbin/mariadbd"),
    ("/run/sshd", 0o755, "root", "/usr/sbin/sshd"),
)


def run(pod: Pod) -> str:
    made = 0
    for name, mode, owner, program in TABLE:
        if program and not pod.has(program):
            continue
        uid, gid = (0, 0) if owner == "root" else user(owner)
        made += ensure(pod.path(name), mode, uid, gid)
    return f"{made} directories made or mended"


def ensure(path: Path, mode: int, uid: int, gid: int) -> bool:
    """True when something had to change. What is right already is not touched: the root may be read-only."""
    try:
        changed = False
        if not path.is_dir():
            path.mkdir(parents=True, mode=mode)
            changed = True
        status = path.stat()
        if (status.st_uid, status.st_gid) != (uid, gid):
            os.chown(path, uid, gid)
            changed = True
        if status.st_mode & 0o7777 != mode:
            path.chmod(mode)
            changed = True
    except OSError as error:
        raise PrepareError(
            f"prepare {path}", error.strerror or str(error), hint="with a read-only root, mount a tmpfs there"
        ) from error
    return changed
