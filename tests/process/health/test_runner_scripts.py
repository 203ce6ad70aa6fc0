"""The runner runs a commit's scripts in order, and tells a broken script from an unfit node."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gitsync import lease
from gitsync.layout import Layout
from health.runner import run as runner
from tests.process.living import alive
from tests.process.runner_world import World, compile_clients, make, resident
from tests.waiting import until


@pytest.fixture
def alone(tmp_path: Path) -> World:
    return make(tmp_path)


@pytest.fixture(params=["alone", "resident"])
def world(request: pytest.FixtureRequest, alone: World) -> Iterator[World]:
    """Run the same test in a Python of its own and by the resident runner's fork."""
    if request.param == "alone":
        yield alone
        return
    compile_clients(alone)
    with resident(alone):
        yield alone
        assert not (alone.root / "runner/missed").exists(), "each run was the resident runner's"


@contextmanager
def broker(world: World, answer: dict[str, object]) -> Iterator[list[dict[str, object]]]:
    """Answer at the broker's socket and collect the requests."""
    asked: list[dict[str, object]] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(world.environment["MINIVM_BROKER"])
    listener.listen()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                asked.append(json.loads(client.makefile().readline()))
                client.sendall(json.dumps(answer).encode() + b"\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_scripts_run_in_the_written_order_and_leave_one_record(world: World) -> None:
    for name in ("20-second", "10-first", "30-third"):
        world.script(f"prolog.d/{name}", f"#!/bin/sh\necho {name} >> {world.root}/order\n")
    code, out, err = world.run("prolog")
    assert (code, out, err) == (0, "", "")
    assert (world.root / "order").read_text().split() == ["10-first", "20-second", "30-third"]
    (record,) = world.records()
    assert (record["kind"], record["job"], record["commit"], record["result"]) == ("prolog", "42", "zero", "ok")
    assert [(entry["script"], entry["result"]) for entry in record["scripts"]] == [
        ("10-first", "ok"),
        ("20-second", "ok"),
        ("30-third", "ok"),
    ]
    assert all(entry["seconds"] >= 0 for entry in record["scripts"])


def test_a_script_sees_slurm_s_variables_a_path_and_nothing_else(world: World) -> None:
    world.script("prolog.d/10-env", f"#!/usr/bin/env bash\nenv > {world.root}/env; pwd >> {world.root}/env\n")
    assert world.run("prolog")[0] == 0
    text = (world.root / "env").read_text()
    assert "SLURM_JOB_ID=42\n" in text
    assert "PATH=/usr/local/sbin:" in text
    assert "MINIVM_SCRIPTS_COMMIT=zero\n" in text
    assert f"MINIVM_SCRIPTS_TREE={world.tree}\n" in text
    assert "SECRET_OF_SLURMD" not in text
    assert text.endswith("/\n")


BROKEN = {
    "a shell's syntax error": ("#!/bin/bash\nif then fi\n", 0o755, "exit 2"),
    "python's syntax error": ("#!/usr/bin/env python3\ndef x(:\n", 0o755, "exit 1"),
    "a python exception": ("#!/usr/bin/env python3\nraise ValueError('no')\n", 0o755, "exit 1: ValueError: no"),
    "a missing program": ("#!/bin/bash\nset -e\nno-such-program\n", 0o755, "exit 127"),
    "a missing interpreter": ("#!/opt/nowhere/python3\n", 0o755, "its interpreter is missing"),
    "not executable": ("#!/bin/sh\ntrue\n", 0o644, "not executable"),
    "no #! line": ("true\n", 0o755, "no #! line"),
    "a crash": ("#!/bin/sh\nkill -SEGV $$\n", 0o755, "ended by SIGSEGV"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_script_does_not_stop_the_job_and_everybody_is_told(world: World, what: str) -> None:
    text, mode, why = BROKEN[what]
    (world.root / "sync/reports").mkdir()
    world.script("prolog.d/10-broken", text, mode)
    world.script("prolog.d/20-good", f"#!/bin/sh\ntouch {world.root}/ran\n")
    assert world.run("prolog")[0] == 0
    assert (world.root / "ran").exists(), "the scripts after it still run"
    (record,) = world.records()
    assert record["result"] == "broken"
    broken = record["scripts"][0]
    assert broken["result"] == "broken"
    assert why in broken["reason"]
    assert Path(broken["evidence"]).read_text()
    verdict = world.verdict("scripts_prolog")
    assert (verdict["result"], verdict["class"]) == ("problem", "user")
    assert "prolog.d/10-broken" in verdict["reason"]
    (report,) = (world.root / "sync/reports").iterdir()
    assert json.loads(report.read_text())["script"] == "prolog.d/10-broken"


def test_policy_may_let_a_broken_script_stop_the_job(world: World) -> None:
    world.policy(runner={"scripts": {"prolog.d/10-broken": {"broken": "fail"}}})
    world.script("prolog.d/10-broken", "#!/bin/sh\nexit 3\n")
    with broker(world, {}) as asked:
        code, _, err = world.run("prolog")
    assert code == 1
    assert "exit 3" in err
    assert asked == [{"ask": "failed"}], "the broker looks for the drain that Slurm sets for it"


def test_the_verdict_of_broken_scripts_is_taken_back_when_they_are_mended(world: World) -> None:
    world.script("prolog.d/10-x", "#!/bin/sh\nexit 3\n")
    world.run("prolog")
    world.script("prolog.d/10-x", "#!/bin/sh\nexit 0\n")
    world.run("prolog")
    assert world.verdict("scripts_prolog")["result"] == "ok"


def test_a_policy_with_a_typo_is_told_and_the_defaults_hold(world: World) -> None:
    world.policy(runner={"prolog": {"bugdet_s": 1}})
    world.script("prolog.d/10-x", "#!/bin/sh\nexit 0\n")
    assert world.run("prolog")[0] == 0
    (record,) = world.records()
    assert record["scripts"][0]["result"] == "ok"
    assert "did you mean 'budget_s'?" in record["broken"][0]


def test_a_script_that_hangs_is_killed_with_everything_it_started(world: World) -> None:
    world.policy(runner={"scripts": {"prolog.d/10-hangs": {"deadline_s": 3.0}}})
    world.script(
        "prolog.d/10-hangs", f"#!/bin/bash\nsleep 600 & echo $! > {world.root}/pid\ntrap '' TERM\nwait\nwait\n"
    )
    world.script("prolog.d/20-good", f"#!/bin/sh\ntouch {world.root}/ran\n")
    assert world.run("prolog")[0] == 0
    assert "did not end within 3 s" in world.records()[0]["scripts"][0]["reason"]
    assert (world.root / "ran").exists()
    assert not alive(int((world.root / "pid").read_text()))


def test_the_whole_run_stays_within_its_budget(world: World) -> None:
    world.policy(runner={"prolog": {"budget_s": 3.0, "deadline_s": 1.2}})
    for name in ("10-a", "20-b", "30-c", "40-d"):
        world.script(f"prolog.d/{name}", "#!/bin/sh\nsleep 600\n")
    assert world.run("prolog")[0] == 0
    reasons = [entry["reason"] for entry in world.records()[0]["scripts"]]
    assert reasons[0] == "did not end within 1.2 s"
    assert reasons[-1] == "not started: the scripts before it used up the time"


def test_a_daemon_that_holds_the_output_does_not_hold_the_prolog(world: World) -> None:
    world.policy(runner={"prolog": {"deadline_s": 20}})
    # The daemon itself says that it has left the script's process group, which ends with the script.
    daemon = f"setsid bash -c 'echo $$ > {world.root}/pid; exec sleep 600' &"
    wait = f"while [ ! -s {world.root}/pid ]; do sleep 0.02; done"
    world.script("prolog.d/10-daemon", f"#!/bin/bash\n{daemon}\n{wait}\n")
    assert world.run("prolog")[0] == 0
    try:
        # Whoever waits for the pipe's end meets the deadline, and calls the script broken.
        assert world.records()[0]["scripts"][0]["result"] == "ok"
    finally:
        os.kill(int((world.root / "pid").read_text()), signal.SIGKILL)


def test_a_flood_of_output_is_cut_and_its_end_kept(world: World) -> None:
    world.script("prolog.d/10-loud", "#!/bin/bash\nhead -c 5000000 /dev/zero | tr '\\0' x\necho the-end >&2\nexit 9\n")
    assert world.run("prolog")[0] == 0
    entry = world.records()[0]["scripts"][0]
    assert entry["reason"] == "exit 9: the-end"
    assert Path(entry["evidence"]).stat().st_size < 200_000


def test_an_unfit_node_fails_the_prolog_once_the_broker_has_drained_it(world: World) -> None:
    world.script("prolog.d/10-look", '#!/bin/sh\necho "the disk is gone" >&2\nexit "$MINIVM_UNFIT"\n')
    with broker(world, {"drained": True, "decisions": {}}) as asked:
        code, _, err = world.run("prolog")
    assert code == 1
    assert "the disk is gone" in err
    assert asked == [{"ask": "gate", "checks": ["prolog.10-look"]}]
    verdict = world.verdict("prolog.10-look")
    assert (verdict["result"], verdict["class"], verdict["reason"]) == ("problem", "node", "the disk is gone")


def test_an_unfit_node_that_the_broker_does_not_drain_runs_the_job(world: World) -> None:
    """Half the fleet says so at once, say: then it is not the node."""
    world.script("prolog.d/10-look", '#!/bin/sh\nexit "$MINIVM_UNFIT"\n')
    with broker(world, {"drained": False, "decisions": {"prolog.10-look": "guarded"}}):
        assert world.run("prolog")[0] == 0
    assert world.records()[0]["checks"]["broker"] == {"prolog.10-look": "guarded"}


@pytest.mark.parametrize(("policy", "code"), [("pass", 0), ("fail", 1)])
def test_policy_says_what_counts_when_nobody_can_confirm(world: World, policy: str, code: int) -> None:
    world.policy(gate={"wait_s": 0.2, "unconfirmed": policy})
    world.script("prolog.d/10-look", '#!/bin/sh\nexit "$MINIVM_UNFIT"\n')
    assert world.run("prolog")[0] == code
    assert world.records()[0]["checks"]["broker"] == "no answer"


def test_an_epilog_never_drains_by_its_exit_code(world: World) -> None:
    world.script("epilog.d/10-look", '#!/bin/sh\nexit "$MINIVM_UNFIT"\n')
    with broker(world, {"drained": True}):
        assert world.run("epilog")[0] == 0
    assert world.verdict("epilog.10-look")["result"] == "problem"


def test_a_task_prolog_passes_on_what_slurmd_understands(world: World) -> None:
    world.script("task_prolog.d/10-env", "#!/bin/sh\necho export A=1\necho noise\necho print hello\necho unset B\n")
    code, out, _ = world.run("task_prolog")
    assert (code, out) == (0, "export A=1\nprint hello\nunset B\n")


def test_a_task_prolog_that_breaks_half_way_exports_nothing(world: World) -> None:
    world.script("task_prolog.d/10-env", "#!/bin/sh\necho export A=1\nexit 5\n")
    world.script("task_prolog.d/20-env", "#!/bin/sh\necho export B=1\n")
    code, out, _ = world.run("task_prolog")
    assert (code, out) == (0, "export B=1\n")


@pytest.mark.root
def test_a_task_prolog_works_for_a_user_who_may_write_nowhere(world: World) -> None:
    world.script("task_prolog.d/10-env", "#!/bin/sh\necho export ME=$(id -u)\n")
    for path in [world.root, *world.root.parents]:
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # In the same interpreter: the one of the tests need not be readable for everybody, as an image's is.
        code = 99
        try:
            os.setgroups([])
            os.setgid(61234)
            os.setuid(61234)
            os.dup2(writing, 1)
            os.environ.clear()
            os.environ.update(world.environment)
            sys.stdout = os.fdopen(1, "w")
            code = runner.main("task_prolog")
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading) as file:
        assert (os.waitstatus_to_exitcode(status), file.read()) == (0, "export ME=61234\n")


def test_no_tree_at_all_is_told_and_stops_no_job(alone: World) -> None:
    code, _, err = alone.run("prolog", MINIVM_GITSYNC_ZERO="/nonexistent")
    assert code == 0
    assert "nothing is published" in err
    assert alone.records()[0]["result"] == "broken"


def test_a_run_finishes_on_its_own_commit_across_a_publish_and_a_prune(world: World) -> None:
    layout = Layout(world.root / "sync", world.tree)
    old, new = "a" * 40, "b" * 40
    for commit in (old, new):
        folder = layout.tree(commit) / "prolog.d"
        folder.mkdir(parents=True)
        for name in ("10-a", "20-b"):
            wait = (
                f"touch {world.root}/here; while [ ! -e {world.root}/go ]; do sleep 0.02; done"
                if name == "10-a"
                else ""
            )
            (folder / name).write_text(
                f"#!/bin/bash\necho {commit} $MINIVM_SCRIPTS_COMMIT >> {world.root}/said\n{wait}\n"
            )
            (folder / name).chmod(0o755)
        layout.leases.mkdir(exist_ok=True)
        layout.lease(commit).touch()
    layout.current.symlink_to(f"trees/{old}")
    process = world.start("prolog")
    until((world.root / "here").exists, "the first script runs")
    # Published in the middle of it; and while it runs its lease keeps the old tree.
    temporary = layout.root / "next"
    temporary.symlink_to(f"trees/{new}")
    temporary.rename(layout.current)
    assert lease.hold(layout).commit == new
    with layout.lease(old).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (world.root / "go").touch()
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert (world.root / "said").read_text().split() == [old] * 4
    assert world.records()[0]["commit"] == old


def test_a_runner_that_is_stopped_takes_its_script_along(world: World) -> None:
    world.script("prolog.d/10-long", f"#!/bin/bash\necho $$ > {world.root}/pid\nexec sleep 600\n")
    process, pid = world.start("prolog"), world.root / "pid"
    until(lambda: pid.exists() and pid.read_text(), "the script runs")
    process.terminate()
    process.communicate(timeout=120)
    if world.clients:
        # Another process ends it, once it sees that the one before it has gone.
        until(lambda: not alive(int(pid.read_text())), "the script is ended")
    assert not alive(int(pid.read_text()))


def test_the_records_are_bounded(world: World) -> None:
    path = world.root / "log/runs.jsonl"
    path.parent.mkdir()
    path.write_text("x" * (8 * 1024 * 1024))
    world.run("prolog")
    assert len(world.records()) == 1
    assert path.with_suffix(".jsonl.1").stat().st_size == 8 * 1024 * 1024


def test_whoever_holds_a_lock_on_the_records_holds_up_no_job(world: World) -> None:
    path = world.root / "log/runs.jsonl"
    path.parent.mkdir()
    path.touch(0o644)
    with path.open() as file:
        # As a job's user could, while the file could be read by everybody.
        fcntl.flock(file, fcntl.LOCK_EX)
        assert world.run("prolog")[0] == 0
    assert len(world.records()) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_that_are_no_scripts_are_left_alone(world: World) -> None:
    for name in ("README.md", ".hidden", "10-x~", "_helper"):
        world.script(f"prolog.d/{name}", "#!/bin/sh\nexit 1\n")
    assert world.run("prolog")[0] == 0
    assert world.records()[0]["scripts"] == []
