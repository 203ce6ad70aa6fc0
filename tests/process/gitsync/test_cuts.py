"""Kill -9 and full disks at every step: readers never miss a tree or see a mixed one, and the next run heals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gitsync import lease
from gitsync.cycle.run import run_cycle
from gitsync.errors import GitsyncError
from gitsync.layout import Layout
from gitsync.repo import child
from gitsync.repo.reader import CommitFile, open_repository
from gitsync.state import load_state
from gitsync.tree.publish import find_damage
from tests.process.gitsync_cutter import Reader, commits, ended_by, forked_cycle, look, move, whole
from tests.process.gitsync_faults import STEPS, interrupted
from tests.process.gitsync_world import World, run
from tests.process.living import alive
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_a_whole_tree_and_the_next_run_heals(world: World, step: str, tmp_path: Path) -> None:
    world.settings = replace(world.settings, keep=1)
    serials = commits(world, 2)
    first, second = serials
    run_cycle(world.settings)
    reader = Reader.start(world.layout, serials, tmp_path)
    move(world, second)
    try:
        # A prune's steps come only when the reader holds nothing of the old tree: then at the next try.
        until(lambda: ended_by(forked_cycle(world, step)) == -signal.SIGKILL, f"{step} is reached")
        # Twice: what a cut leaves must not stop a second cut, or the heal after it.
        ended_by(forked_cycle(world, step))
        live = world.live()
        assert live in (first, second) and look(world.layout.tree(live), live, serials) is None
        whole(world, second, serials)
    finally:
        reader.stop()


def test_a_git_that_is_killed_while_it_verifies_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Git has written the signature to a file for ssh-keygen; a stand-in for ssh-keygen kills git then.

    Git has given no verdict on the commit, so the commit is not refused.
    """
    commits(world, 1)
    program, room = tmp_path / "bin" / "ssh-keygen", tmp_path / "tmp"
    program.parent.mkdir()
    room.mkdir()
    program.write_text("#!/bin/sh\nkill -9 $PPID\n")
    program.chmod(0o755)
    monkeypatch.setattr(child, "PATH", f"{program.parent}:{child.PATH}")
    monkeypatch.setenv("TMPDIR", str(room))
    before = set(Path("/tmp").glob(".git_vtag_tmp*"))
    with contextlib.suppress(GitsyncError):
        run_cycle(world.settings)
    assert "refused" not in capsys.readouterr().out
    monkeypatch.setattr(child, "PATH", child.PATH.partition(":")[2])
    run_cycle(world.settings)
    assert world.layout.tree(world.live()).is_dir() and world.live() != "zero", "the next try takes it"
    assert set(Path("/tmp").glob(".git_vtag_tmp*")) - before == set()
    assert not [*room.iterdir()] and not [*world.layout.root.glob(".unfinished-*")]


@pytest.mark.parametrize("step", [step for step in STEPS if step not in {"locked", "saved"}])
def test_a_full_disk_at_any_step_is_an_error_that_passes(world: World, step: str) -> None:
    world.settings = replace(world.settings, keep=1)
    serials = commits(world, 2)
    first, second = serials
    run_cycle(world.settings)
    move(world, second)
    with contextlib.suppress(OSError), interrupted(step, "full"):
        run_cycle(world.settings)
    live = world.live()
    assert live in (first, second) and look(world.layout.tree(live), live, serials) is None
    whole(world, second, serials)


CUTS = 300


def test_random_cuts() -> None:
    """Run the cuts in a small process and in memory.

    A fork of this process costs ten times as much, and the cuts are about processes: they need not wait for a disk
    each time.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gitsync-") as folder:
        argv = [sys.executable, "-m", "tests.process.gitsync_cutter", folder, str(CUTS)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    cuts = json.loads(done.stdout.splitlines()[-1])
    assert cuts["killed"] + cuts["finished"] == CUTS
    assert cuts["killed"] > CUTS / 2, cuts
    # The cuts did not simply stand still: cycles in between did publish every commit.
    assert cuts["published"] == cuts["commits"], cuts
    assert cuts["looks"] > 100, cuts


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path)
    yield path
    run("umount", path)


@pytest.mark.root
def test_a_disk_that_is_really_full(world: World, small_disk: Path) -> None:
    """Less and less room each time, from none: wherever the cycle runs out, the last good tree stays."""
    world.settings = replace(world.settings, root=small_disk / "root", keep=1)
    serials = commits(world, 2)
    first, second = serials
    run_cycle(world.settings)
    world.upstream.write({"random": os.urandom(400_000)})
    world.upstream.git("checkout", "-q", "--detach", second)
    big = world.upstream.commit(signer=world.alice)
    failed = 0
    for room in (0, 4096, 20_000, 60_000, 200_000, 420_000, 600_000, 800_000):
        filler = small_disk / "filler"
        space = os.statvfs(small_disk)
        filler.write_bytes(b"\0" * max(0, space.f_bavail * space.f_frsize - room))
        with contextlib.suppress(OSError):
            run_cycle(world.settings)
        live = world.live()
        assert live in (first, big)
        if live == first:
            failed += 1
            assert look(world.layout.tree(first), first, serials) is None
        filler.unlink()
    assert failed >= 4
    known = run_cycle(world.settings)
    assert known.failures == 0 and world.live() == big
    assert find_damage(world.layout.tree(big), _entries(world, big)) is None


def _entries(world: World, commit: str) -> list[CommitFile]:
    with open_repository(world.layout.repository) as reader:
        return reader.entries(commit, "")


def test_a_prolog_that_runs_across_publishes_ends_on_its_own_commit(world: World, tmp_path: Path) -> None:
    """A process started from a lease, a hundred lines of script later: its library is still its own commit's."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    prolog = f'#!/bin/bash\nread -r _ <{gate}\n. "$(dirname "$0")/../lib/say.sh"\n'

    def content(word: str) -> dict[str, str | bytes | None]:
        return {"prolog.d/10-slow": prolog, "lib/say.sh": f"echo {word}\n"}

    world.settings = replace(world.settings, keep=1)
    first = world.upstream.commit(content("first"), signer=world.alice)
    run_cycle(world.settings)
    # The runner in miniature: it holds the lease for as long as its script runs.
    held = lease.hold(world.layout)
    running = subprocess.Popen([str(held.path / "prolog.d/10-slow")], stdout=subprocess.PIPE, text=True)
    for word in ("second", "third"):
        world.upstream.commit(content(word), signer=world.alice)
        run_cycle(world.settings)
    assert world.live() != first
    gate.write_text("go\n")
    out, _ = running.communicate(timeout=120)
    held.release()
    assert out == "first\n"
    run_cycle(world.settings)
    assert not world.layout.tree(first).exists()


def test_a_reader_killed_while_holding_lets_go(world: World) -> None:
    world.settings = replace(world.settings, keep=1)
    serials = commits(world, 2)
    first, second = serials
    run_cycle(world.settings)
    code = "import sys, time; from gitsync import lease; h = lease.hold(); print(h.commit, flush=True); time.sleep(600)"
    env = os.environ | {
        "MINIVM_GITSYNC_ROOT": str(world.settings.root),
        "MINIVM_GITSYNC_ZERO": str(world.settings.zero),
    }
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert holder.stdout is not None and holder.stdout.readline().strip() == first
    move(world, second)
    run_cycle(world.settings)
    assert world.layout.tree(first).is_dir()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    run_cycle(world.settings)
    assert not world.layout.tree(first).exists()


def test_git_left_by_a_killed_cycle_is_ended_by_the_next(world: World, tmp_path: Path) -> None:
    """The server hangs in the middle of a fetch, the cycle is killed: its git must not block the root for ever."""
    serials = commits(world, 2)
    second = list(serials)[1]
    run_cycle(world.settings)
    move(world, second)
    stuck = tmp_path / "upload-pack"
    pids = tmp_path / "pids"
    stuck.write_text(f"#!/bin/sh\necho $$ >>{pids}\nexec sleep 600\n")
    stuck.chmod(0o755)
    config = world.upstream.path / "config"
    assert config.exists()
    real = world.settings
    # ssh's place is taken by a program that says nothing for ten minutes.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").symlink_to(stuck)
    world.settings = replace(real, repo="ssh://nowhere/repo.git")
    before = child.PATH
    child.PATH = f"{tmp_path / 'bin'}:{before}"
    try:
        pid = forked_cycle(world)
        until(pids.exists, "ssh was started")
        os.kill(pid, signal.SIGKILL)
        ended_by(pid)
    finally:
        child.PATH = before
    world.settings = real
    whole(world, second, serials)
    left = int(pids.read_text().split()[0])
    until(lambda: not alive(left), "it is gone")


def test_the_state_survives_any_content(world: World) -> None:
    serials = commits(world, 1)
    run_cycle(world.settings)
    for text in ("", "{", "[]", '{"published": 3}', '{"published": {"commit": "x"}}', '{"unknown": 1}'):
        world.layout.state.write_text(text)
        known = run_cycle(world.settings)
        assert known.published is not None and known.published.commit == next(iter(serials))
    assert load_state(world.layout.state).published is not None


def test_a_report_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """On a full disk (here: no file may have a byte) nobody is told, and no half file lies there for ever."""
    layout = Layout(tmp_path)
    layout.reports.mkdir()
    code = (
        "import resource\nfrom gitsync import lease\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "raise SystemExit(7 if lease.report('9' * 40, 'prolog.d/10-b', 'hangs') is False else 1)"
    )
    env = {"MINIVM_GITSYNC_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, list(layout.reports.iterdir())) == (7, [])


@pytest.mark.root
def test_a_reader_who_is_not_root_gets_the_path_and_no_lock() -> None:
    """A task prolog runs as the job's user: it finds the tree, and can neither change it nor keep or block anything."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gitsync-") as folder:
        Path(folder).chmod(0o755)
        world = World.make(Path(folder))
        commit = next(iter(commits(world, 1)))
        run_cycle(world.settings)
        code = (
            "import os\nfrom gitsync import lease\nheld = lease.hold()\n"
            "print(held.commit, held.locked, (held.path / 'a').read_text().strip())\n"
            "print(lease.report(held.commit, 'x', 'y'))\n"
            "for path in (held.path / 'a', held.path / 'new', held.path.parent.parent / 'leases' / held.commit):\n"
            "    try:\n        os.close(os.open(path, os.O_RDWR | os.O_CREAT))\n        print('wrote', path)\n"
            "    except PermissionError:\n        print('refused')\n"
        )
        env = {"MINIVM_GITSYNC_ROOT": str(world.settings.root), "PYTHONPATH": str(ROOT)}
        # A copy that the user can read: this checkout may lie where others may not look.
        modules = {"ground": ("__init__", "errors", "files"), "gitsync": ("__init__", "errors", "layout", "lease")}
        for package, names in modules.items():
            (Path(folder) / package).mkdir(mode=0o755)
            for name in names:
                (Path(folder) / package / f"{name}.py").write_bytes((ROOT / package / f"{name}.py").read_bytes())
        env["PYTHONPATH"] = folder
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code], env=env, capture_output=True, text=True, user=65534, group=65534, cwd="/"
        )
        assert done.stdout.splitlines() == [f"{commit} False 0", "False", "refused", "refused", "refused"], done.stderr


def test_cycles_at_the_same_time_take_turns(world: World) -> None:
    serials = commits(world, 2)
    second = list(serials)[1]
    run_cycle(world.settings)
    move(world, second)
    pids = [forked_cycle(world) for _ in range(6)]
    assert [ended_by(pid) for pid in pids] == [0] * 6
    whole(world, second, serials)
    assert load_state(world.layout.state).published_total == 3  # generation zero, the first, the second


def test_a_lock_that_is_held_by_a_living_cycle_is_not_broken(world: World) -> None:
    serials = commits(world, 2)
    second = list(serials)[1]
    run_cycle(world.settings)
    move(world, second)
    pid = forked_cycle(world, "verified", "stop")
    try:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is in the middle")
        with pytest.raises(GitsyncError, match="another gitsync is running"):
            run_cycle(world.settings, lock_wait=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
        assert ended_by(pid) == 0
    assert world.live() == second
