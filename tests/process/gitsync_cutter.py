"""Cutting cycles while a reader looks: what the tests of cuts share, and many cuts in a row."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import git  # noqa: F401  # once, so that a forked cycle does not pay for GitPython each time

from gitsync import lease
from gitsync.cycle.run import run_cycle
from gitsync.layout import ZERO, Layout
from gitsync.settings import Backward
from gitsync.tree import publish
from gitsync.tree.admit import MARKER
from tests.process.gitsync_faults import STEPS, interrupted
from tests.process.gitsync_world import World, run
from tests.waiting import until

ENOUGH = 10  # looks of a reader, at least


def stamped(serial: int) -> dict[str, str | bytes | None]:
    """Build a tree in which every file names its commit, except two files that never change."""
    return {
        "a": f"{serial}\n",
        "prolog.d/10-b": f"#!/bin/sh\n# {serial}\n",
        "deep/er/c": f"{serial}\n" * 50,
        "lib/d.conf": f"SERIAL = {serial}\n",
        "e": f"{serial}\n",
        "same": "same\n",
        MARKER: '{"name": "minivm-scripts"}\n',
    }


def look(path: Path, commit: str, serials: dict[str, int]) -> str | None:
    """Describe the defect of a tree that claims to be `commit`, or return None."""
    if commit == ZERO:
        return None if (path / "prolog.d/10-hello").is_file() else "generation zero is not whole"
    expected = stamped(serials[commit])
    for name, content in expected.items():
        try:
            found = (path / name).read_text()
        except OSError as error:
            return f"{commit}: {name}: {error}"
        if found != content:
            return f"{commit}: {name} holds {found[:40]!r}"
    found_names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return (
        None if found_names == set(expected) else f"{commit}: {sorted(found_names ^ set(expected))} too many or missing"
    )


@dataclass
class Reader:
    """A process that looks at the tree without a pause, as prologs do, until told to stop."""

    pid: int
    complaints: Path
    looks: Path

    @classmethod
    def start(cls, layout: Layout, serials: dict[str, int], folder: Path) -> Reader:
        complaints, looks = folder / "complaints", folder / "looks"
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                cls.read(layout, serials, complaints, looks)
                status = 0
            os._exit(status)
        until(looks.exists, "the reader looked for the first time")
        return cls(pid, complaints, looks)

    @staticmethod
    def read(layout: Layout, serials: dict[str, int], complaints: Path, looks: Path) -> None:
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        dice, count = random.Random(1), 0
        # On a quick machine a cut is over before ten looks: then it looks on at what the cut left.
        while not asked or count <= ENOUGH:
            try:
                with lease.hold(layout) as held:
                    wrong = look(held.path, held.commit, serials)
                    if dice.random() < 0.3:
                        time.sleep(dice.random() * 0.05)
                        wrong = wrong or look(held.path, held.commit, serials)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            # And as those do who know nothing of leases: through the link, opened once.
            try:
                fd = os.open(layout.current, os.O_RDONLY | os.O_DIRECTORY)
                os.close(fd)
            except OSError as error:
                wrong = wrong or f"the link: {error}"
            count += 1
            if wrong:
                with complaints.open("a") as out:
                    out.write(f"{wrong}\n")
            looks.write_text(str(count))
            time.sleep(0.01)

    def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)
        assert not self.complaints.exists(), self.complaints.read_text()[:2000]
        looks = int(self.looks.read_text())
        assert looks > ENOUGH
        return looks


def commits(world: World, count: int) -> dict[str, int]:
    """Signed commits in the upstream repository, each with its serial; the first is its tip."""
    serials = {world.upstream.commit(stamped(serial), signer=world.alice): serial for serial in range(count)}
    move(world, next(iter(serials)))
    return serials


def move(world: World, commit: str) -> None:
    """Push `commit` without the time that a push takes."""
    reference = world.upstream.path / "refs/heads/main"
    temporary = reference.with_name(".new")
    temporary.write_text(f"{commit}\n")
    temporary.rename(reference)


def forked_cycle(world: World, step: str = "", action: str = "kill") -> int:
    """Fork a cycle, interrupted at a step if one is named; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with interrupted(step, action) if step else contextlib.nullcontext():
            run_cycle(world.settings)
        status = 0
    finally:
        os._exit(status)


def ended_by(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def whole(world: World, commit: str, serials: dict[str, int]) -> None:
    """Check that one undisturbed run later the world is as if nothing had happened."""
    known = run_cycle(world.settings)
    assert known.failures == 0 and known.quarantine is None, known
    assert world.live() == commit
    assert look(world.layout.tree(commit), commit, serials) is None
    left = [path.name for base in (world.layout.root, world.layout.trees) for path in base.iterdir()]
    assert not [name for name in left if name.startswith(".")], left
    assert {path.name for path in world.layout.leases.iterdir()} == set(publish.list_trees(world.layout))
    run("git", f"--git-dir={world.layout.repository}", "fsck", "--strict", "--no-dangling")
    assert not list(world.layout.repository.rglob("*.lock"))


def many_cuts(folder: Path, count: int) -> dict[str, int]:
    """Each cut at a random moment or a random step of whatever the cycle has to do after the cuts before it."""
    world = World.make(folder)
    world.settings = replace(world.settings, keep=2, backward=Backward.ALLOW)
    serials = commits(world, 12)
    order = list(serials)
    run_cycle(world.settings)
    begun = time.monotonic()
    ended_by(forked_cycle(world))
    idle = time.monotonic() - begun
    dice = random.Random(20240607)
    reader = Reader.start(world.layout, serials, folder)
    killed = finished = 0
    published: set[str] = set()
    target = order[0]
    try:
        for cut in range(count):
            if world.live() == target:
                target = order[(order.index(target) + 1 + cut % 3) % len(order)]
                move(world, target)
            begun = time.monotonic()
            if dice.random() < 0.5:
                pid = forked_cycle(world, dice.choice(STEPS))
            else:
                pid = forked_cycle(world)
                # A full cycle takes a few times an idle one; most cuts must fall inside it.
                _wait(pid, dice.random() * idle * 2)
                os.kill(pid, signal.SIGKILL)
            status = ended_by(pid)
            killed += status == -signal.SIGKILL
            finished += status == 0
            # The first measure is of a moment in which the machine may have been busy.
            idle = min(idle, time.monotonic() - begun) if status == 0 else idle
            published.add(world.live())
    finally:
        looks = reader.stop()
    move(world, order[3])
    whole(world, order[3], serials)
    return {
        "killed": killed, "finished": finished, "published": len(published), "commits": len(order), "looks": looks,
    }  # fmt: skip


def _wait(pid: int, seconds: float) -> None:
    """Until the moment, or the process ends before it."""
    fd = os.pidfd_open(pid)
    try:
        select.select([fd], [], [], seconds)
    finally:
        os.close(fd)


if __name__ == "__main__":
    print(json.dumps(many_cuts(Path(sys.argv[1]), int(sys.argv[2]))))
