"""What a container that was killed left behind and a daemon would believe."""

from __future__ import annotations

from init.prepare.pod import Pod

# sssd exits 0, silently, when a foreign process has the pid of its old file; munged refuses a socket that exists;
# pid files of another life name processes of this one; a login pod that drained keeps /run/nologin.
FILES = (
    "/run/sssd.pid",
    "/run/munge/munge.socket.2",
    "/run/munge/munge.socket.2.lock",
    "/run/munge/munged.pid",
    "/run/nologin",
    "/etc/nologin",
    "/run/sshd.pid",
    "/run/mysqld/mysqld.pid",
    "/run/mysqld/mysqld.sock",
)
PATTERNS = (("/run/slurm", "*.pid"), ("/run/slurmd", "*.pid"), ("/run/slurmctld", "*.pid"))


def run(pod: Pod) -> str:
    removed = []
    candidates = [pod.path(name) for name in FILES]
    for directory, pattern in PATTERNS:
        candidates += sorted(pod.path(directory).glob(pattern))
    for path in candidates:
        if path.is_symlink() or path.exists():
            path.unlink()
            removed.append(path.name)
    return f"removed {', '.join(removed)}" if removed else "nothing stale"
