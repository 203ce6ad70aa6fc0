"""A fork of the resident runner stays for further runs: each is whole, and has nothing of the one before."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gitsync.layout import Layout
from health.runner.worker import SpareChildren, make_channel
from tests.process.living import alive
from tests.process.runner_world import World, compile_clients, make, resident
from tests.waiting import until

pytestmark = pytest.mark.root

SAYS = "#!/bin/sh\necho $SLURM_JOB_ID $PPID >> {root}/ran\n"
# As the image brings it: it runs in the fork itself, and leaves what it has changed there.
LEAVES = """#!/usr/bin/python3 -IS
import os, sys
found = os.umask(0o077), "left" in sys.path, "LEFT" in os.environ, os.environ["SLURM_JOB_ID"]
sys.path.insert(0, "left")
os.environ["LEFT"] = "1"
print(*found, os.getpid(), file=open({place!r}, "a"))
"""

# The second job's step ends in the middle.
OPENS = """#!/usr/bin/python3 -IS
import fcntl, os, time
print(os.environ["SLURM_JOB_ID"], os.getpid(), file=open({ran!r}, "a"), flush=True)
if os.environ["SLURM_JOB_ID"] == "2":
    fcntl.flock(os.open({ran!r}, os.O_RDONLY), fcntl.LOCK_EX)
    {end}
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    found = make(tmp_path)
    compile_clients(found)
    found.script("prolog.d/10-x", SAYS.format(root=found.root))
    return found


def ran(world: World) -> dict[str, int]:
    """Job -> who ran it."""
    lines = (world.root / "ran").read_text().splitlines()
    found = {job: int(pid) for job, pid in map(str.split, lines)}
    assert len(found) == len(lines), f"a run was done twice: {lines}"
    return found


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def one(world: World, job: object, kind: str = "prolog", **extra: str) -> None:
    assert world.run(kind, SLURM_JOB_ID=str(job), **extra) == (0, "", "")


def test_runs_that_come_one_after_the_other_have_one_fork_which_then_ends(world: World) -> None:
    with resident(world) as runner:
        for job in range(5):
            one(world, job)
        one(world, "long", LONG="x" * 100_000)
        found = ran(world)
        assert len({found[str(job)] for job in range(5)}) == 1, found
        assert found["long"] != found["0"], "what is too long for it has a fork of its own"
        until(lambda: not children(runner), "nobody stays for ever")
    assert [entry["job"] for entry in world.records()] == ["0", "1", "2", "3", "4", "long"]


@pytest.mark.parametrize("size", [-1, 0, 1, 60_000, "many"])
def test_a_request_is_whole_however_large(world: World, size: int | str) -> None:
    """The client says it in pieces of 64 KiB: as one that just fits, as one that does not, as many."""
    world.script("prolog.d/10-x", f"#!/bin/sh\nenv > {world.root}/env\n")
    given = {f"SLURM_V{number}": str(number) * 10 for number in range(3000 if size == "many" else 3)}
    if isinstance(size, int):
        others = {**world.environment, **given, "SLURM_JOB_ID": "1", "SLURM_LAST": ""}
        length = sum(len(f"{name}={value}") + 1 for name, value in others.items())
        given["SLURM_LAST"] = "x" * ((1 << 16) - len(f"minivm 1 prolog {1 << 16}\n") - length + size)
    with resident(world):
        one(world, 1, **given)
    found = dict(line.split("=", 1) for line in (world.root / "env").read_text().splitlines())
    assert given.items() <= found.items()
    assert not (world.root / "runner/missed").exists()


def test_what_one_run_changes_of_its_process_the_next_does_not_find(world: World) -> None:
    place = world.root / "found"
    library = Path(__file__).resolve().parents[3] / "scripts/lib/jobs.py"
    world.script("lib/jobs.py", library.read_text(), 0o644)
    (world.tree / "prolog.d/10-x").unlink()
    world.script("prolog.d/10-leaves", LEAVES.format(place=str(place)))
    with resident(world):
        for job in (1, 2, 3):
            one(world, job)
    rows = [line.split() for line in place.read_text().splitlines()]
    assert [row[3] for row in rows] == ["1", "2", "3"]
    assert len({row[4] for row in rows}) == 1, "it was one process"
    assert {tuple(row[:3]) for row in rows} == {(str(0o022), "False", "False")}, rows


def test_one_that_was_killed_while_it_waited_costs_no_run(world: World) -> None:
    with resident(world) as runner:
        for job in range(20):
            one(world, job)
            for pid in children(runner):
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: not alive(pid), "it is gone")  # type: ignore[misc]
        assert len(set(ran(world).values())) == 20
    assert not (world.root / "runner/missed").exists()


def test_one_that_hangs_while_it_waits_holds_up_one_run_which_it_does_not_do_when_it_wakes(world: World) -> None:
    compile_clients(world, patience_ms=3000)
    with resident(world) as runner:
        one(world, 1)
        (hand,) = children(runner)
        os.kill(hand, signal.SIGSTOP)
        code, _, told = world.run("prolog", SLURM_JOB_ID="2")
        assert (code, "it did not answer in time" in told) == (0, True)
        for job in (3, 4):
            one(world, job)
        os.kill(hand, signal.SIGCONT)
        until(lambda: not children(runner), "it has found nobody waiting, and is gone")
        assert hand not in [ran(world)[job] for job in ("2", "3", "4")]


def test_one_whose_run_had_something_to_say_does_no_other(world: World) -> None:
    world.policy(runner={"scripts": {"prolog.d/10-x": {"broken": "fail"}}})
    world.script("prolog.d/10-x", SAYS.format(root=world.root) + "[ $SLURM_JOB_ID != 2 ]\n")
    with resident(world):
        one(world, 1)
        code, _, told = world.run("prolog", SLURM_JOB_ID="2")
        assert (code, "prolog.d/10-x: exit 1" in told) == (1, True)
        one(world, 3)
    found = ran(world)
    assert found["1"] == found["2"] != found["3"]


@pytest.mark.parametrize("end", ["time.sleep(60)", "raise OSError"])
def test_one_whose_step_was_cut_or_failed_does_no_other(world: World, end: str) -> None:
    """The cut may have come between an open and its close, or while the fork held a lock."""
    library = Path(__file__).resolve().parents[3] / "scripts/lib/jobs.py"
    world.script("lib/jobs.py", library.read_text(), 0o644)
    world.policy(runner={"scripts": {"prolog.d/20-opens": {"deadline_s": 3.0}}})
    (world.tree / "prolog.d/10-x").unlink()
    world.script("prolog.d/20-opens", OPENS.format(ran=str(world.root / "ran"), end=end))
    with resident(world) as runner:
        for job in (1, 2, 3):
            one(world, job)
        found = ran(world)
        assert found["1"] == found["2"] != found["3"]
        until(lambda: found["2"] not in children(runner), "it is gone, and what it held with it")
        until(lambda: is_free_of(world.root / "ran"), "nobody holds it")
    assert [entry["result"] for entry in world.records()] == ["ok", "broken", "ok"]


def test_one_that_waits_holds_no_commit_and_the_next_run_is_of_what_is_current_then(world: World) -> None:
    layout, commits = Layout(world.root / "sync", world.tree), ["a" * 40, "b" * 40]
    layout.leases.mkdir()
    for commit in commits:
        layout.lease(commit).touch()
        path = layout.tree(commit) / "prolog.d/10-x"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho {commit} $MINIVM_SCRIPTS_COMMIT $PPID >> {world.root}/of\n")
        path.chmod(0o755)
    with resident(world):
        for commit in (*commits, *commits):
            (layout.root / "next").symlink_to(f"trees/{commit}")
            (layout.root / "next").rename(layout.current)
            one(world, 1)
            with layout.lease(commit).open("rb") as file:
                until(lambda file=file: is_free(file.fileno()), "nobody holds it")  # type: ignore[misc]
    rows = [line.split() for line in (world.root / "of").read_text().splitlines()]
    assert [row[0] for row in rows] == [row[1] for row in rows] == [*commits, *commits]
    assert len({row[2] for row in rows}) == 1


def is_free_of(path: Path) -> bool:
    with path.open("rb") as file:
        return is_free(file.fileno())


def is_free(lease: int) -> bool:
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_who_waits_ends_with_the_runner(world: World) -> None:
    with resident(world) as runner:
        one(world, 1)
        (hand,) = children(runner)
        runner.kill()
        runner.wait()
        until(lambda: not alive(hand), "its runner has no more runs for it")


def test_a_fork_grows_by_nothing_with_its_runs(world: World) -> None:
    library = Path(__file__).resolve().parents[3] / "scripts/lib/jobs.py"
    world.script("lib/jobs.py", library.read_text(), 0o644)
    (world.tree / "prolog.d/10-x").unlink()
    world.script("prolog.d/10-leaves", LEAVES.format(place=str(world.root / "found")))
    with resident(world) as runner:
        sizes = []
        for _ in range(3):
            for job in range(60):
                one(world, job)
            (hand,) = children(runner)
            sizes.append(int(Path(f"/proc/{hand}/statm").read_text().split()[1]))
        descriptors = os.listdir(f"/proc/{hand}/fd")  # noqa: PTH208  # of /proc
    assert len({line.split()[4] for line in (world.root / "found").read_text().splitlines()}) == 1
    assert sizes[2] - sizes[1] <= 16, f"{sizes} pages"
    assert len(descriptors) < 8


def test_one_that_is_let_go_ends_though_another_fork_has_a_copy_of_its_door() -> None:
    hands, (ours, theirs) = SpareChildren(), make_channel()
    hands.add(1, ours)
    copy = os.dup(ours.fileno())
    try:
        hands.remove(1)
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
    finally:
        os.close(copy)
        theirs.close()
