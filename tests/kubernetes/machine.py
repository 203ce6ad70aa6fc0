"""One machine of the lab: its power, its daemons, its cgroups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.kubernetes import plan
from tests.kubernetes.errors import LabError
from tests.kubernetes.host import attempt, run, wait_for
from tests.kubernetes.plan import Machine
from tests.kubernetes.programs import HERE, ROOT, Programs

CGROUPS = Path("/sys/fs/cgroup")
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Writes its number and becomes the daemon.
DAEMON = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'
# While a process is on its way out its directory is busy.
PATIENCE = 60.0


def number(machine: Machine) -> int:
    """PID 1 of the machine, by its number outside; 0 if it is off. A number of another boot is a stranger's."""
    try:
        found = int((machine.state / "pid").read_text())
        words = Path(f"/proc/{found}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return 0
    return found if str(machine.state).encode() in words else 0


def power_on(machine: Machine) -> None:
    if number(machine):
        return
    for name in ("kubelet", "log", "containerd", "cni"):
        (machine.state / name).mkdir(parents=True, exist_ok=True)
    volumes = machine.state.parent / "volumes"
    volumes.mkdir(exist_ok=True)
    for stale in (*machine.state.glob("*.pid"), machine.state / "pid"):
        stale.unlink(missing_ok=True)
    outside = ("nsenter", f"--net=/run/netns/{machine.netns}")
    inside = ("unshare", "--mount", "--pid", "--uts", "--ipc", *since_now(), "--fork", "--kill-child")
    command = (*outside, *inside, str(HERE / "machine.sh"), machine.name, str(machine.state), str(volumes))
    with (machine.state / "machine.log").open("ab") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    wait_for(
        lambda: bool(number(machine)) or started.poll() is not None,
        f"{machine.name}'s power",
        within=120,
        why=lambda: last_words(machine, "machine"),
    )
    if started.poll() is not None:
        raise LabError(f"power on {machine.name}", last_words(machine, "machine"))


def since_now() -> tuple[str, ...]:
    """Clocks that count from a machine's start begin at nothing with each; the wall clock is the host's."""
    now = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
    return ("--time", *(f"--{name}=-{int(time.clock_gettime(clock))}" for name, clock in now.items()))


def power_off(machine: Machine) -> None:
    """Kill the machine: the kernel ends its processes and takes its mounts away."""
    if found := number(machine):
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
        wait_for(lambda: not number(machine), f"{machine.name} to be off", within=120)
    for stale in (*machine.state.glob("*.pid"), machine.state / "pid"):
        stale.unlink(missing_ok=True)
    for top in CGROUPS.glob(f"*/{machine.cgroup}"):
        prune(top)


def run_on(machine: Machine, *command: str) -> str:
    return run(*entered(machine), *command)


def entered(machine: Machine) -> tuple[str, ...]:
    found = number(machine)
    if not found:
        raise LabError(f"run anything on {machine.name}", "it is off")
    return ("nsenter", "-t", str(found), "-m", "-p", "-u", "-i", "-n", "-T", "--")


def start(machine: Machine, programs: Programs, words: Sequence[str], *, name: str = "") -> None:
    """Start a daemon, unless it runs."""
    daemon = name or words[0]
    if running(machine, daemon):
        return
    pid = machine.state / f"{daemon}.pid"
    pid.unlink(missing_ok=True)
    command = (*entered(machine), "/bin/sh", "-c", DAEMON, str(pid), *words)
    with (machine.state / f"{daemon}.log").open("ab") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": f"{programs.bin}:{SYSTEM}", "HOME": "/root", "PYTHONPATH": str(ROOT)},
        )
    wait_for(pid.exists, f"{daemon} on {machine.name}", within=120)


def inner(machine: Machine, daemon: str) -> int:
    """Its number on the machine, where it runs; 0 otherwise."""
    try:
        found = int((machine.state / f"{daemon}.pid").read_text())
    except (OSError, ValueError):
        return 0
    outside = number(machine)
    return found if outside and Path(f"/proc/{outside}/root/proc/{found}").exists() else 0


def running(machine: Machine, daemon: str) -> bool:
    return bool(inner(machine, daemon))


def daemons(machine: Machine) -> dict[str, bool]:
    """Tell of each started daemon whether it runs."""
    return {path.stem: running(machine, path.stem) for path in sorted(machine.state.glob("*.pid"))}


def kill(machine: Machine, daemon: str) -> None:
    """Send SIGKILL, and wait until the daemon is gone."""
    if found := inner(machine, daemon):
        run_on(machine, "kill", "-KILL", str(found))
        wait_for(lambda: not running(machine, daemon), f"{daemon} on {machine.name} to end", within=120)


def last_words(machine: Machine, daemon: str) -> str:
    path = machine.state / f"{daemon}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return f"{daemon} on {machine.name} said last: {' / '.join(lines[-3:]) or 'nothing'}"


def dead(machines: Sequence[Machine]) -> str:
    """The daemons that were started and are gone, with their last words."""
    gone = [(machine, name) for machine in machines for name, runs in daemons(machine).items() if not runs]
    return "; ".join(last_words(machine, name) for machine, name in gone) or "all daemons run"


def make_cgroups(machine: Machine) -> None:
    for hierarchy in hierarchies():
        for part in (plan.CGROUP, machine.cgroup):
            (hierarchy / part).mkdir(exist_ok=True)
            # Nothing may run in a directory of this hierarchy that has neither.
            if hierarchy.name == "cpuset":
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (hierarchy / part / name).write_text((hierarchy / name).read_text())


def hierarchies() -> Iterator[Path]:
    for path in CGROUPS.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != "unified":
            yield path


def refusal() -> str:
    """Why nodes cannot be had here; empty where they can."""
    if os.geteuid() != 0:
        return "namespaces and cgroups need root"
    if not (CGROUPS / "memory").is_dir() or not (CGROUPS / "devices").is_dir():
        return "this machine has no cgroup v1, and a kubelet of 1.20 was tried with nothing else"
    return ""


def prune(top: Path) -> None:
    """Leaves first."""
    deadline = time.monotonic() + PATIENCE
    while top.is_dir():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
        if top.is_dir():
            if time.monotonic() > deadline:
                raise LabError(f"remove {top}", "something still runs in it")
            time.sleep(0.02)


def sysctl(name: str, value: str = "") -> str:
    return attempt("sysctl", "-n" if not value else "-qw", f"{name}={value}" if value else name).stdout.strip()
