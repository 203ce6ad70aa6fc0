"""CPU and memory limits of the pod as Slurm settings: slurmd sees the whole machine, and would offer all of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from init.pod.pod import Pod

# cgroup v1 writes "no limit" as the largest multiple of a page.
V1_UNLIMITED = 1 << 60
MIB = 1 << 20


def cpu_limit(pod: Pod) -> float | None:
    """Return the CPUs that the quota allows, or None."""
    text = pod.text("/sys/fs/cgroup/cpu.max")
    if text is not None:
        quota, _, period = text.strip().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    for directory in ("cpu", "cpu,cpuacct"):
        quota_text = pod.text(f"/sys/fs/cgroup/{directory}/cpu.cfs_quota_us")
        period_text = pod.text(f"/sys/fs/cgroup/{directory}/cpu.cfs_period_us")
        if quota_text is not None and period_text is not None:
            return None if int(quota_text) <= 0 else int(quota_text) / int(period_text)
    return None


def memory_limit(pod: Pod) -> int | None:
    """Return the limit in bytes, or None."""
    text = pod.text("/sys/fs/cgroup/memory.max")
    if text is not None:
        return None if text.strip() == "max" else int(text)
    text = pod.text("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if text is None or int(text) >= V1_UNLIMITED:
        return None
    return int(text)


def cpus(pod: Pod) -> tuple[int, int]:
    """Count the online cores and threads, as slurmd does."""
    cores = set()
    threads = 0
    for directory in sorted(pod.path("/sys/devices/system/cpu").glob("cpu[0-9]*")):
        if (_number(directory / "online") or 0) == 0 and (directory / "online").exists():
            continue
        threads += 1
        package = _number(directory / "topology/physical_package_id")
        core = _number(directory / "topology/core_id")
        cores.add((package, core) if core is not None else directory.name)
    return len(cores), threads


def memory(pod: Pod) -> int:
    """Return the machine's memory in mebibytes."""
    for line in (pod.text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return 0


def configuration(cores: int, threads: int, mebibytes: int, cpu: float | None, limit: int | None) -> Mapping[str, str]:
    """Reserve the rest of the machine with CoreSpecCount and MemSpecLimit, so that Slurm keeps jobs off it."""
    settings = {}
    if cpu is not None and cores and threads:
        usable = max(1, int(cpu * cores / threads))
        if usable < cores:
            settings["CoreSpecCount"] = str(cores - usable)
    if limit is not None and 0 < limit // MIB < mebibytes:
        settings["MemSpecLimit"] = str(mebibytes - limit // MIB)
    return settings


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def found(pod: Pod) -> Mapping[str, str]:
    cores, threads = cpus(pod)
    return configuration(cores, threads, memory(pod), cpu_limit(pod), memory_limit(pod))
