"""Directories that daemons require, with the owner and mode without which they exit."""

from __future__ import annotations

import os
from pathlib import Path

from init.pod.pod import Pod, PrepareError, user, write

TABLE = Path(__file__).with_name("directories.conf")


def run(pod: Pod) -> str:
    created = 0
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, mode, owner, *programs = line.split()
        if all(pod.has(program.lstrip("!")) != program.startswith("!") for program in programs):
            uid, gid = owner_of(owner)
            created += ensure(pod.path(name), int(mode, 8), uid, gid)
    return f"{created} directories created or repaired"


def owner_of(text: str) -> tuple[int, int]:
    """Return the ids of `USER`, with its own group, or of `USER:GROUP`, a group named like its user."""
    name, _, group = text.partition(":")
    uid, gid = (0, 0) if name == "root" else user(name)
    return (uid, user(group)[1]) if group else (uid, gid)


def ensure(path: Path, mode: int, uid: int, gid: int) -> bool:
    """Create or fix a directory; True if anything changed. A correct one is not touched: the root may be read-only."""
    try:
        changed = False
        if not path.is_dir():
            path.mkdir(parents=True, mode=mode)
            changed = True
        if os.geteuid() != 0:
            return changed  # a pod that runs as one ordinary user: its volumes have the owner that they have
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


# Remove files that a killed container left behind and a daemon would believe.


# sssd exits 0, silently, when another process has the pid of its old file; munged refuses an existing socket; old pid
# files name unrelated processes; a login pod that drained keeps /run/nologin.
FILES = (
    "/run/sssd.pid",
    "/run/munge/munge.socket.2",
    "/run/munge/munge.socket.2.lock",
    "/run/munge/munged.pid",
    "/run/slurm/sack.socket",
    "/run/slurmctld/sack.socket",
    "/run/slurmdbd/sack.socket",
    "/run/nologin",
    "/etc/nologin",
    "/run/sshd.pid",
    "/run/mysqld/mysqld.pid",
    "/run/mysqld/mysqld.sock",
)
PATTERNS = (("/run/slurm", "*.pid"), ("/run/slurmd", "*.pid"), ("/run/slurmctld", "*.pid"))
# The life in which the files were last checked: run again in a running pod, this step would remove sockets in use.
MARKER = "/run/minivm/life"


def life(pod: Pod) -> str:
    """Identify the machine's boot and PID 1's start: a restarted container is another life."""
    start = (pod.text("/proc/1/stat") or "").rpartition(")")[2].split()
    return f"{(pod.text('/proc/sys/kernel/random/boot_id') or '').strip()} {start[19] if len(start) > 19 else ''}"


def remove_stale(pod: Pod) -> str:
    now = life(pod)
    if pod.text(MARKER) == now:
        return "already done in this life of the pod"
    removed = []
    candidates = [pod.path(name) for name in FILES]
    for directory, pattern in PATTERNS:
        candidates += sorted(pod.path(directory).glob(pattern))
    for path in candidates:
        if path.is_symlink() or path.exists():
            path.unlink()
            removed.append(path.name)
    write(pod.path(MARKER), now.encode(), mode=0o644)
    return f"removed {', '.join(removed)}" if removed else "nothing stale"
