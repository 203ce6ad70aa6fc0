"""Remove files that a killed container left behind and a daemon would believe."""

from __future__ import annotations

from init.pod.pod import Pod, write

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


def run(pod: Pod) -> str:
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
