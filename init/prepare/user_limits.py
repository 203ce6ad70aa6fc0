"""Per-user limits on a login pod: one cgroup per user, over all sessions, tmux and leftover processes.

No systemd is here to create them. This step finds out what the pod may write to, creates the common directories, and
writes two small tables for the rest: for a login (`/usr/libexec/minivm/admit`, by PAM) and for a prompt
(`/etc/profile.d/60-minivm-limits.sh`). Ulimits, which apply per process, cover what cgroups cannot.
"""

from __future__ import annotations

import re
from pathlib import Path

from init.errors import ConfigError
from init.fields import number
from init.pod.pod import Pod, write
from init.prepare import cgroups

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


def run(pod: Pod) -> str:
    total = cgroups.memory_limit(pod) or cgroups.memory(pod) * cgroups.MIB
    memory = amount(pod.setting("MINIVM_PER_USER_MEMORY", MEMORY), total)
    processes = count(pod.setting("MINIVM_PER_USER_PROCESSES", PROCESSES))
    granted, tables = cgroups.granted(pod), Tables()
    v2 = "unified" in granted
    if processes and "pids" in granted:
        hold_processes(tables, granted["pids"], processes)
    if memory and "memory" in granted:
        hold_memory(tables, granted["memory"], memory, int(total * TOGETHER), v2=v2)
    if "cpu" in granted:
        share_processors(tables, granted["cpu"], v2=v2)
    limits = {"cpu": 1, "memory": memory, "pids": processes}
    granted_limits = [name for name, value in limits.items() if value and name in granted]
    missing = {name: value for name, value in limits.items() if value and name not in granted and name != "cpu"}
    for path, lines in ((AT_LOGIN, tables.at_login), (AT_PROMPT, tables.at_prompt), (ULIMITS, ulimits(missing))):
        write(pod.path(path), "".join(lines).encode(), mode=0o644, owner=OWNER)
    has = [f"{processes} processes"] * bool(processes) + [f"{gibibytes(memory)} of memory"] * bool(memory)
    by = [f"cgroups ({', '.join(granted_limits)})"] * bool(granted_limits)
    by += [f"ulimits, which know no sum ({', '.join(missing)}; {cgroups.summary(pod, granted)})"] * bool(missing)
    return f"a person has {' and '.join(has) or 'no limit'}, by {' and '.join(by) or 'nothing'}"


def hold_processes(tables: Tables, place: Path, processes: int) -> None:
    common(place)
    (place / PEOPLE / RESCUE / "pids.max").write_text(str(RESCUE_PROCESSES))
    tables.limit(place, "pids.max", processes)
    tables.tell(place, "pids.events", "max", f"{processes} processes and threads: new ones were refused.")


def hold_memory(tables: Tables, place: Path, memory: int, together: int, *, v2: bool) -> None:
    hard, counts = ("memory.max", "memory.events") if v2 else ("memory.limit_in_bytes", "memory.oom_control")
    common(place)
    (place / PEOPLE / hard).write_text(str(together))
    (place / PEOPLE / RESCUE / hard).write_text(str(min(RESCUE_MEMORY, together)))
    if v2:
        tables.limit(place, "memory.high", int(memory * THROTTLED))
    tables.limit(place, hard, memory)
    tables.tell(place, counts, "oom_kill", f"{gibibytes(memory)} of memory: a process of yours was ended.")


def share_processors(tables: Tables, place: Path, *, v2: bool) -> None:
    """Set equal weights: each user may use all processors until they are short, and then an equal share."""
    common(place)
    tables.limit(place, *(("cpu.weight", 100) if v2 else ("cpu.shares", 1024)))


def common(place: Path) -> None:
    """Create the directory of the users' cgroups, with the one for emergencies."""
    people = place / PEOPLE
    people.mkdir(exist_ok=True)
    cgroups.delegate(people)
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
