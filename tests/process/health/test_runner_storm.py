"""Jobs begin and end while the resident runner is killed, hangs, has no memory, and commits change under it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gitsync.layout import Layout
from tests.process.runner_world import World, compile_clients, make
from tests.waiting import until

pytestmark = pytest.mark.root

# MINIVM_TEST_JOBS=500: the same, and longer.
JOBS = int(os.environ.get("MINIVM_TEST_JOBS", "24"))
HANDS = 8
USER = 61237
KINDS = ("prolog", "task_prolog", "epilog")
COMMITS = ["a" * 40, "b" * 40]
# Who runs it, where in the run it stands, whose it is, and whose it is told to be.
SAYS = '#!/bin/sh\necho "$PPID {where} {commit} $MINIVM_SCRIPTS_COMMIT" >> {said}/$SLURM_JOB_ID-$MINIVM_KIND\n'
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = make(tmp_path)
    compile_clients(world, None)
    layout, said = Layout(world.root / "sync", world.tree), world.root / "said"
    said.mkdir()
    said.chmod(0o777)
    layout.leases.mkdir()
    for commit in COMMITS:
        layout.lease(commit).touch()
        for kind, where in itertools.product(KINDS, ("begin", "end")):
            path = layout.tree(commit) / f"{kind}.d" / {"begin": "10-begin", "end": "90-end"}[where]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SAYS.format(where=where, commit=commit, said=said))
            path.chmod(0o755)
    layout.current.symlink_to(f"trees/{COMMITS[0]}")
    for above in [*said.parents][:-1]:
        above.chmod(above.stat().st_mode | 0o011)
    return world


class Init:
    """Starts the runner again when it has ended, as PID 1 does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.over = threading.Event()
        self.started = 0
        self.process = self.start()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        with (self.world.root / "runner.log").open("ab") as said:
            command = [sys.executable, "-I", "-m", "health.runner"]
            return subprocess.Popen(command, env=self.world.environment, stderr=said, cwd="/")

    def watch(self) -> None:
        while not self.over.wait(0.02):
            if self.process.poll() is not None:
                self.process = self.start()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def kill_a_fork(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            pid = self.process.pid
            os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGKILL)

    def end(self) -> None:
        self.over.set()
        self.thread.join()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def no_memory(pid: int) -> Iterator[None]:
    """Put the process in a cgroup with room for no run: the kernel kills the runner or its forks anywhere."""
    group = MEMORY / f"minivm-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("1M")
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(left), signal.SIGKILL)
        until(lambda: not (group / "cgroup.procs").read_text(), "nobody is left in it")
        group.rmdir()


class Jobs:
    """Each is started and ended as slurmd does it; what a run's exit code is slurmd drains a node by."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.over: list[int] = []
        self.failed: list[str] = []

    def one(self, number: int) -> None:
        try:
            for kind in KINDS:
                ended = self.run(kind, number, USER if kind == "task_prolog" else 0)
                if "cannot run the task prolog" in ended.stderr:
                    # Without a plan it is a Python of its own, and the tests' may lie where only root comes to.
                    ended = self.run(kind, number, 0)
                if ended.returncode:
                    self.failed.append(f"{number} {kind}: {ended.returncode} {ended.stderr}")
        finally:
            # Also one that could not be started: that is said when its answer is asked for.
            self.over.append(number)

    def run(self, kind: str, number: int, user: int) -> subprocess.CompletedProcess[str]:
        assert self.world.clients is not None
        # Each time: another session of pytest keeps the directory that they share to root.
        for above in [*self.world.root.parents][:-1]:
            above.chmod(above.stat().st_mode | 0o011)
        return subprocess.run(
            [str(self.world.clients / kind)],
            env={**self.world.environment, "SLURM_JOB_ID": str(number)},
            user=user,
            group=user,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=120,
        )

    def more(self, count: int) -> None:
        """Until so many more are over, or all are."""
        wanted = min(len(self.over) + count, JOBS)
        until(lambda: len(self.over) >= wanted, f"{wanted} jobs are over", within=300, seen=lambda: sorted(self.over))


def foster_parents() -> set[str]:
    """To one of which a script comes whose runner is killed before it has looked who that is: it could be anybody's."""
    pids = [str(os.getpid())]
    while (parent := Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[1]) != "0":
        pids.append(parent)
    return {*pids, "1"}


def publish(world: World, commit: str) -> None:
    layout = Layout(world.root / "sync", world.tree)
    (layout.root / "next").symlink_to(f"trees/{commit}")
    (layout.root / "next").rename(layout.current)


def storm(world: World, init: Init, jobs: Jobs) -> None:
    def hang() -> None:
        init.signal(signal.SIGSTOP)
        jobs.more(2)
        # As PID 1 does to one that says nothing for a minute; every other one wakes by itself.
        init.signal(signal.SIGKILL if next(turns) % 2 else signal.SIGCONT)

    def starve() -> None:
        with no_memory(init.process.pid):
            jobs.more(2)

    turns = itertools.count()
    faults: list[Callable[[], None]] = [init.kill, init.kill_a_fork, hang]
    if os.access(MEMORY, os.W_OK):
        faults.append(starve)
    for fault, commit in zip(itertools.cycle(faults), itertools.cycle(reversed(COMMITS)), strict=False):
        fault()
        publish(world, commit)
        jobs.more(2)
        if len(jobs.over) >= JOBS:
            return


def test_a_storm_fails_no_job_and_each_run_is_whole_and_of_one_commit(world: World) -> None:
    init, jobs = Init(world), Jobs(world)
    try:
        with ThreadPoolExecutor(HANDS) as hands:
            running = [hands.submit(jobs.one, number) for number in range(JOBS)]
            storm(world, init, jobs)
            for one in running:
                one.result()
        assert jobs.failed == []
        assert init.started > 2
        until(lambda: (world.root / "runner.prom").exists(), "the runner is back")
        jobs.one(JOBS)
    finally:
        init.end()
    seen, orphans_of = set(), foster_parents()
    for number, kind in itertools.product(range(JOBS + 1), KINDS):
        runs: dict[str, list[tuple[str, str]]] = {}
        for line in (world.root / f"said/{number}-{kind}").read_text().splitlines():
            runner, where, commit, told = line.split()
            assert commit == told
            seen.add(commit)
            if runner not in orphans_of:
                runs.setdefault(runner, []).append((where, commit))
        # Who was ended in the middle has begun and not ended; somebody has done both.
        for steps in runs.values():
            assert [where for where, _ in steps] in (["begin"], ["begin", "end"]), runs
            assert len({commit for _, commit in steps}) == 1, runs
        assert any(len(steps) == 2 for steps in runs.values()), runs
    assert seen == set(COMMITS)
