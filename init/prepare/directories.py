"""Directories that daemons require, with the owner and mode without which they exit."""

from __future__ import annotations

import os
from pathlib import Path

from init.pod.pod import Pod, PrepareError, user

TABLE = Path(__file__).with_name("directories.conf")


def run(pod: Pod) -> str:
    made = 0
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, mode, owner, *programs = line.split()
        if all(pod.has(program.lstrip("!")) != program.startswith("!") for program in programs):
            uid, gid = (0, 0) if owner == "root" else user(owner)
            made += ensure(pod.path(name), int(mode, 8), uid, gid)
    return f"{made} directories created or repaired"


def ensure(path: Path, mode: int, uid: int, gid: int) -> bool:
    """Create or fix a directory; True if anything changed. A correct one is not touched: the root may be read-only."""
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
