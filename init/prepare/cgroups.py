"""Writable cgroups below /sys/fs/cgroup: find out what the pod may write to, not what it should.

cgroup v2 allows no processes beside delegated controllers ("no internal processes"), so running processes move to a
leaf of their own. In v1 each hierarchy is separate, and its users create their directories there.

Steps: `cgroups` and `gather-cgroups` for Slurm, `user-limits` for the people of a login pod.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from init.errors import ConfigError
from init.fields import number
from init.pod.pod import Pod, writable, write

ROOT = "/sys/fs/cgroup"
LEAF = "minivm"
CONTROLLERS = "cgroup.controllers"
TURNS = 20  # passes over a directory's processes: some start while others are moved
V1 = ("freezer", "memory", "cpuset", "devices", "cpuacct", "cpu", "pids")


def run(pod: Pod) -> str:
    """Report to a worker what Slurm can use."""
    controllers = find_granted(pod)
    version = "none" if not ({"freezer", "unified"} & set(controllers)) else "v2" if "unified" in controllers else "v1"
    pod.publish("cgroup", {"MINIVM_CGROUP": version})
    return summary(pod, controllers)


def find_granted(pod: Pod) -> Mapping[str, Path]:
    """Map controllers to the directory where this pod may create cgroups; with v2 also `unified`, the common one."""
    root = pod.path(ROOT)
    if not (root / CONTROLLERS).exists():
        return {name: root / name for name in V1 if (root / name).is_dir() and writable(root / name)}
    if not writable(root):
        return {}
    leave(root)
    return dict.fromkeys(["unified", *delegate(root)], root)


def summary(pod: Pod, controllers: Mapping[str, Path]) -> str:
    names = " ".join(name for name in controllers if name != "unified")
    if "unified" in controllers:
        return f"cgroup v2, delegated: {names or 'no controllers'}"
    if controllers:
        return f"cgroup v1, writable: {names}"
    version = "v2" if (pod.path(ROOT) / CONTROLLERS).exists() else "v1"
    return f"cgroup {version}, read-only: no containment by cgroups"


def leave(root: Path) -> None:
    """Move the processes out of the directory that delegates."""
    leaf = root / LEAF
    leaf.mkdir(exist_ok=True)
    _move(root, leaf)


def gather(pod: Pod) -> str:
    """Move the pod's own processes back to their leaf before slurmd starts.

    At each start of its slurmd Slurm 24.11 moves all processes beside it, PID 1 included, into a directory below, and
    the next time into one below that, until the path is too long. Now it moves them down one level only.
    """
    leaf = pod.path(f"{ROOT}/{LEAF}")
    below = [Path(name) for name, _, _ in os.walk(leaf, topdown=False)][:-1]  # the deepest first
    if not below or not writable(leaf):
        return "all in one place"
    for directory in (*below, leaf):
        _withhold(directory)
    for directory in below:
        _move(directory, leaf)
        with contextlib.suppress(OSError):  # a child started there at this moment: the next start moves it
            directory.rmdir()
    return f"all back in {leaf}, from below it"


def _move(place: Path, to: Path) -> None:
    for _ in range(TURNS):
        with contextlib.suppress(OSError):  # the directory has gone
            if not (pids := (place / "cgroup.procs").read_text().split()):
                return
            for pid in pids:
                with contextlib.suppress(OSError):  # it has exited, or is a kernel thread
                    (to / "cgroup.procs").write_text(pid)


def _withhold(directory: Path) -> None:
    """Withdraw all controllers: a directory that delegates them may have no processes."""
    with contextlib.suppress(OSError):
        for name in (directory / "cgroup.subtree_control").read_text().split():
            (directory / "cgroup.subtree_control").write_text(f"-{name}")


def delegate(directory: Path) -> list[str]:
    """Delegate a v2 directory's controllers to those below it; v1 has no delegation."""
    if not (directory / CONTROLLERS).exists():
        return []
    delegated = []
    for name in (directory / CONTROLLERS).read_text().split():
        with contextlib.suppress(OSError):  # a controller that the parent withholds does not affect the rest
            (directory / "cgroup.subtree_control").write_text(f"+{name}")
            delegated.append(name)
    return delegated


# CPU and memory limits of the pod as Slurm settings: slurmd sees the whole machine, and would offer all of it.


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


def node_limits(pod: Pod) -> Mapping[str, str]:
    cores, threads = cpus(pod)
    return configuration(cores, threads, memory(pod), cpu_limit(pod), memory_limit(pod))


# Per-user limits on a login pod: one cgroup per user, over all sessions, tmux and leftover processes.
#
# No systemd is here to create them. The step `user-limits` creates the common directories and writes two small tables
# for the rest: for a login (/usr/libexec/minivm/admit, by PAM) and for a prompt (/etc/profile.d/60-minivm-limits.sh).

AT_LOGIN = "/run/minivm/user-limits"  # DIRECTORY FILE VALUE: settings of a user's cgroup
# DIRECTORY FILE KEY TEXT: the counter to watch, and the message when it grows
AT_PROMPT = "/run/minivm/user-limits.prompt"
ULIMITS = "/run/minivm/limits.conf"
OWNER = (0, 0)
PEOPLE = "users"
# The cgroup for a user without a free process: to look, and to end some.
RESCUE = "rescue"
RESCUE_PROCESSES = 64
RESCUE_MEMORY = 512 << 20
MEMORY, PROCESSES = "25%", "2000"
# Share of the pod's memory for all users together: the rest keeps sshd and Slurm's commands alive.
TOGETHER = 0.9
# Share at which the kernel slows a process down and reclaims memory, before it kills.
THROTTLED = 0.9
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
ADVICE = "Larger work belongs in a job: srun, salloc, sbatch."


class Tables:
    """Lines for logins and prompts."""

    __slots__ = ("at_login", "at_prompt")

    def __init__(self) -> None:
        self.at_login: list[str] = []
        self.at_prompt: list[str] = []

    def limit(self, place: Path, file: str, value: int) -> None:
        self.at_login.append(f"{place / PEOPLE} {file} {value}\n")

    def tell(self, place: Path, file: str, key: str, text: str) -> None:
        self.at_prompt.append(f"{place / PEOPLE} {file} {key} your share here is {text} {ADVICE}\n")


def limit_users(pod: Pod) -> str:
    """Prepare a cgroup for each user of a login pod, and ulimits for what cgroups cannot limit; describe both."""
    total = memory_limit(pod) or memory(pod) * MIB
    each = amount(pod.setting("MINIVM_PER_USER_MEMORY", MEMORY), total)
    processes = count(pod.setting("MINIVM_PER_USER_PROCESSES", PROCESSES))
    controllers, tables = find_granted(pod), Tables()
    v2 = "unified" in controllers
    if processes and "pids" in controllers:
        hold_processes(tables, controllers["pids"], processes)
    if each and "memory" in controllers:
        hold_memory(tables, controllers["memory"], each, int(total * TOGETHER), v2=v2)
    if "cpu" in controllers:
        share_processors(tables, controllers["cpu"], v2=v2)
    limits = {"cpu": 1, "memory": each, "pids": processes}
    granted_limits = [name for name, value in limits.items() if value and name in controllers]
    missing = {name: value for name, value in limits.items() if value and name not in controllers and name != "cpu"}
    for path, lines in ((AT_LOGIN, tables.at_login), (AT_PROMPT, tables.at_prompt), (ULIMITS, ulimits(missing))):
        write(pod.path(path), "".join(lines).encode(), mode=0o644, owner=OWNER)
    has = [f"{processes} processes"] * bool(processes) + [f"{gibibytes(each)} of memory"] * bool(each)
    by = [f"cgroups ({', '.join(granted_limits)})"] * bool(granted_limits)
    by += [f"ulimits, which know no sum ({', '.join(missing)}; {summary(pod, controllers)})"] * bool(missing)
    return f"a person has {' and '.join(has) or 'no limit'}, by {' and '.join(by) or 'nothing'}"


def hold_processes(tables: Tables, place: Path, processes: int) -> None:
    make_common(place)
    (place / PEOPLE / RESCUE / "pids.max").write_text(str(RESCUE_PROCESSES))
    tables.limit(place, "pids.max", processes)
    tables.tell(place, "pids.events", "max", f"{processes} processes and threads: new ones were refused.")


def hold_memory(tables: Tables, place: Path, memory: int, together: int, *, v2: bool) -> None:
    hard, counts = ("memory.max", "memory.events") if v2 else ("memory.limit_in_bytes", "memory.oom_control")
    make_common(place)
    (place / PEOPLE / hard).write_text(str(together))
    (place / PEOPLE / RESCUE / hard).write_text(str(min(RESCUE_MEMORY, together)))
    if v2:
        tables.limit(place, "memory.high", int(memory * THROTTLED))
    tables.limit(place, hard, memory)
    tables.tell(place, counts, "oom_kill", f"{gibibytes(memory)} of memory: a process of yours was ended.")


def share_processors(tables: Tables, place: Path, *, v2: bool) -> None:
    """Set equal weights: each user may use all processors until they are short, and then an equal share."""
    make_common(place)
    tables.limit(place, *(("cpu.weight", 100) if v2 else ("cpu.shares", 1024)))


def make_common(place: Path) -> None:
    """Create the directory of the users' cgroups, with the one for emergencies."""
    people = place / PEOPLE
    people.mkdir(exist_ok=True)
    delegate(people)
    (people / RESCUE).mkdir(exist_ok=True)


def ulimits(missing: dict[str, int]) -> str:
    """Format limits for pam_limits. `data`, not `as`: editors and runtimes reserve far more addresses than they use."""
    lines = ["# Written at boot by minivm: what cgroups do not hold in this pod.", "* soft core 0"]
    if "pids" in missing:
        lines.append(f"* - nproc {missing['pids']}")
    if "memory" in missing:
        lines.append(f"* - data {missing['memory'] >> 10}")
    return "\n".join(lines) + "\n"


def gibibytes(number: int) -> str:
    return f"{number / UNITS['Gi']:.3g} GiB"


def amount(text: str, total: int) -> int:
    """Parse a quantity as Kubernetes writes it, or a percentage of the total, in bytes."""
    if part := re.fullmatch(r"(\d{1,3})%", text):
        return total * int(part[1]) // 100
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|Ki|Mi|Gi|Ti)", text)
    if not match:
        raise ConfigError(
            "share the login pod", f"MINIVM_PER_USER_MEMORY is {text!r}", hint="such as 25% or 8Gi; 0: no limit"
        )
    return int(float(match[1]) * UNITS[match[2]])


def count(text: str) -> int:
    parsed = number(text)
    if parsed is None:
        raise ConfigError("share the login pod", f"MINIVM_PER_USER_PROCESSES is {text!r}", hint="a number; 0: no limit")
    return parsed
