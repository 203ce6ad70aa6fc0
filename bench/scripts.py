"""Measure a job's scripts on a healthy node with 20 checks.

It compares fresh verdicts with the same checks run inline, and the resident runner with a new Python for each run.

`python -m bench scripts`, or `python -m bench.scripts`. Wall time from start to exit, as slurmd sees it, and the CPU
time of the whole process tree, which says more on a busy machine. The checks are the default tree's host checks
(except the load, which this bench itself causes), twice under two names, to make 20.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.process.runner_world import LAUNCH, World, compile_clients, make, resident

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (
    "clock", "d_state", "disk_inodes", "disk_space", "ethernet", "kernel_log", "memory",
    "memory_fragmentation", "mounts", "uptime",
)  # fmt: skip


def build(folder: Path) -> World:
    world = make(folder)
    shutil.copytree(ROOT / "scripts/lib", world.tree / "lib", dirs_exist_ok=True)
    (world.tree / "health.d").mkdir()
    for name in [*CHECKS, *(f"{name}_again" for name in CHECKS)]:
        text = (ROOT / f"scripts/health.d/{name.removesuffix('_again')}.py").read_text()
        text = text.replace(f'name="{name.removesuffix("_again")}"', f'name="{name}"')
        # Run each check before every job; its verdict is valid for an hour.
        text = text.replace("when=frozenset({", "expires_s=3600, when=frozenset({When.PROLOG, ")
        world.script(f"health.d/{name}.py", text, 0o644)
    return world


@dataclass(frozen=True, slots=True)
class Cost:
    wall_ms: float
    cpu_ms: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_ms + other.wall_ms, self.cpu_ms + other.cpu_ms)


def timed(argv: list[str], env: dict[str, str], user: int = 0) -> Cost:
    start = time.perf_counter()
    # Discard the output, so that the figures do not include a terminal.
    null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (1, 2)]
    # posix_spawn cannot change the user: take the user's id for the call, then root's again.
    if user:
        os.setresuid(user, user, 0)
    pid = os.posix_spawn(argv[0], argv, env, file_actions=null)
    if user:
        os.setresuid(0, 0, 0)
    # The usage includes the children that the process waited for.
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{argv} ended with {os.waitstatus_to_exitcode(status)}")
    return Cost(seconds * 1000, (usage.ru_utime + usage.ru_stime) * 1000)


def figures(count: int, once: Callable[[], Cost]) -> tuple[float, float, float]:
    costs = [once() for _ in range(count)]
    times = sorted(cost.wall_ms for cost in costs)
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    return statistics.median(times), p99, statistics.median(cost.cpu_ms for cost in costs)


def used_ms(pid: int) -> float:
    """Return the processor time of a process, its children, and the children that those waited for."""
    ticks = 0
    for process in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        # A fork may just have ended.
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


# What was measured: median and 99th percentile of the time, and the median of the processor time, in milliseconds.
Row = tuple[str, float, float, float]


def measure_ways(world: World, job: dict[str, str]) -> list[Row]:
    """Measure each kind by a Python of its own, then by the resident runner, including the runner's processor time."""
    rows = []
    compile_clients(world)
    assert world.clients is not None
    for place in [*world.root.parents][:-1]:
        place.chmod(place.stat().st_mode | 0o011)
    with resident(world) as runner:
        for kind in ("prolog", "epilog", "task_prolog"):
            user = 61999 if kind == "task_prolog" else 0
            alone = [sys.executable, "-I", "-c", LAUNCH.format(kind=kind)]
            rows.append((f"{kind}, by a Python of its own", *figures(30, partial(timed, alone, job))))
            before = used_ms(runner.pid)
            # With MINIVM_JOB_* set the task prolog runs the scripts itself: measure it with the image's directories.
            own = {name: value for name, value in job.items() if not user or not name.startswith("MINIVM_JOB_")}
            median, p99, cpu = figures(200, partial(timed, [str(world.clients / kind)], own, user))
            rows.append((f"{kind}, by the resident runner", median, p99, cpu + (used_ms(runner.pid) - before) / 200))
        rows.append(
            (
                "64 epilogs at once, by the resident runner, until the last ends",
                *figures(5, partial(at_once, world, job)),
            )
        )
    return rows


def at_once(world: World, job: dict[str, str]) -> Cost:
    """Measure 64 epilogs of different jobs at once, as slurmd starts them when jobs end together."""
    began = time.perf_counter()
    runs = [
        subprocess.Popen([f"{world.clients}/epilog"], env={**job, "SLURM_JOB_ID": str(1000 + number)})
        for number in range(64)
    ]
    if sum(run.wait() for run in runs):
        raise RuntimeError("an epilog failed")
    return Cost((time.perf_counter() - began) * 1000, 0.0)


def measure_checks(world: World, prolog: list[str], check: list[str]) -> list[Row]:
    """Measure a prolog with fresh verdicts, with none, and each check by itself."""
    names = sorted(path.stem for path in (world.tree / "health.d").glob("*.py"))

    def run_inline() -> Cost:
        # Without the index nothing is known, and the prolog runs every check itself, in one child.
        (world.root / "health/index.json").unlink(missing_ok=True)
        return timed(prolog, world.environment)

    def run_each() -> Cost:
        return sum((timed([*check, "--checks", name], world.environment) for name in names), Cost(0, 0))

    timed([*check, "--when", "prolog"], world.environment)
    rows = [
        ("bare interpreter (`python3 -I -c pass`): the floor", *figures(100, lambda: timed([*prolog[:3], "pass"], {}))),
        ("prolog, 20 verdicts fresh", *figures(200, lambda: timed(prolog, world.environment))),
    ]
    record = world.records()[-1]["checks"]
    if record != {"fresh": 20, "ran": 0}:
        raise RuntimeError(f"this measures something else: {json.dumps(record)}")
    rows.append(("prolog, the 20 checks run inline in one child", *figures(30, run_inline)))
    rows.append(("the 20 checks, an interpreter each, one after the other", *figures(5, run_each)))
    return rows


def measure_default_tree(world: World, prolog: list[str], check: list[str], job: dict[str, str]) -> Row:
    """Measure a prolog with fresh verdicts that also runs the default tree's scripts."""
    shutil.copytree(ROOT / "scripts/prolog.d", world.tree / "prolog.d")
    timed([*check, "--when", "prolog"], world.environment)
    return (
        "prolog, 20 verdicts fresh, with the default tree's two scripts",
        *figures(100, lambda: timed(prolog, job)),
    )


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="bench-scripts-"))
    try:
        world = build(folder)
        prolog = [sys.executable, "-I", "-c", LAUNCH.format(kind="prolog")]
        check = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(world.tree), "--commit", "zero"]
        job = {
            **world.environment,
            "MINIVM_JOB_WORK": str(folder / "work"),
            "MINIVM_JOB_LOGS": str(folder / "logs"),
            "MINIVM_DCGM_JOBS": str(folder / "dcgm"),
        }
        rows = measure_checks(world, prolog, check)
        base = rows[1][3]
        rows.append(measure_default_tree(world, prolog, check, job))
        # On a node the checks run in the background, and a user's job runs the whole default tree.
        for kind in ("epilog", "task_prolog"):
            shutil.copytree(ROOT / f"scripts/{kind}.d", world.tree / f"{kind}.d")
        job |= {"SLURM_JOB_UID": "61999", "MINIVM_SHM": str(folder / "shm"), "MINIVM_MQUEUE": str(folder / "mqueue")}
        rows += measure_ways(world, job)
        print("| what | median, ms | p99, ms | CPU, ms | CPU against the fresh prolog |\n|---|---|---|---|---|")
        for what, median, p99, cpu in rows:
            print(f"| {what} | {median:.0f} | {p99:.0f} | {cpu:.0f} | {cpu / base:.1f}x |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
