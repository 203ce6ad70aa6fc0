"""What a container that was killed left behind and a daemon would believe."""

from __future__ import annotations

from init.pod.pod import Pod, write

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
# Whose life the files were last looked at in: run again in a living pod, this step would remove living sockets.
MARKER = "/run/minivm/life"


def life(pod: Pod) -> str:
    """The boot of the machine and the start of PID 1 in it: the same container started again is another life."""
    start = (pod.text("/proc/1/stat") or "").rpartition(")")[2].split()
    return f"{(pod.text('/proc/sys/kernel/random/boot_id') or '').strip()} {start[19] if len(start) > 19 else ''}"


def run(pod: Pod) -> str:
    now = life(pod)
    if pod.text(MARKER) == now:
        return "looked already in this life of the pod"
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
