"""The resident runner may be killed, hang, be absent or be talked to by anybody: each job's run is one whole run."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gitsync.layout import Layout
from health import black_box
from tests.process.living import alive
from tests.process.runner_world import World, compile_clients, make, resident
from tests.waiting import until

pytestmark = pytest.mark.root

USER = 61236
COUNT = "#!/bin/sh\necho $SLURM_JOB_ID >> {root}/ran\n"
WAITS = "#!/bin/sh\necho $SLURM_JOB_ID >> {root}/ran\nwhile [ ! -e {root}/go ]; do sleep 0.02; done\n"


@pytest.fixture
def world(tmp_path: Path) -> World:
    found = make(tmp_path)
    compile_clients(found)
    return found


def ran(world: World) -> list[str]:
    path = world.root / "ran"
    return path.read_text().split() if path.exists() else []


def missed(world: World) -> int:
    path = world.root / "runner/missed"
    return path.stat().st_size if path.exists() else 0


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_without_a_runner_each_run_is_done_all_the_same_counted_and_told_once(world: World) -> None:
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    told = [world.run("prolog", SLURM_JOB_ID=str(job))[2] for job in (1, 2, 3)]
    assert ran(world) == ["1", "2", "3"]
    assert missed(world) == 3
    assert ["did not take a run (it is not running)" in text for text in told] == [True, False, False]
    with resident(world):
        assert world.run("prolog", SLURM_JOB_ID="4") == (0, "", "")
        metric = world.root / "runner.prom"
        until(lambda: "minivm_runner_missed_total 3" in metric.read_text(), "it knows how many it has missed")
    assert (missed(world), ran(world)) == (0, ["1", "2", "3", "4"])


def test_a_runner_that_hangs_is_not_waited_for_and_runs_nothing_when_it_wakes(world: World) -> None:
    compile_clients(world, patience_ms=3000)
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    with resident(world) as runner:
        runner.send_signal(signal.SIGSTOP)
        for job in ("1", "2"):
            assert world.run("prolog", SLURM_JOB_ID=job)[0] == 0
        assert (ran(world), missed(world)) == (["1", "2"], 2)
        runner.send_signal(signal.SIGCONT)
        assert world.run("prolog", SLURM_JOB_ID="3") == (0, "", "")
        until(lambda: not children(runner), "whatever it has begun is over")
        assert (ran(world), missed(world)) == (["1", "2", "3"], 0)


def test_a_runner_that_is_killed_ends_no_run_and_the_next_goes_on_without_it(world: World) -> None:
    world.script("prolog.d/10-x", WAITS.format(root=world.root))
    with resident(world) as runner:
        run = world.start("prolog", SLURM_JOB_ID="1")
        until(lambda: ran(world) == ["1"], "the script runs")
        runner.kill()
        runner.wait()
        (world.root / "go").touch()
        assert (run.communicate(timeout=120), run.returncode) == (("", ""), 0)
        assert world.run("prolog", SLURM_JOB_ID="2")[0] == 0
    assert ran(world) == ["1", "2"]


def test_a_run_whose_process_is_killed_is_done_again(world: World) -> None:
    """The kernel kills a runner process when memory runs out; the job is not at fault."""
    world.script("prolog.d/10-x", WAITS.format(root=world.root))
    with resident(world) as runner:
        run = world.start("prolog", SLURM_JOB_ID="1")
        until(lambda: ran(world) == ["1"], "the script runs")
        for pid in children(runner):
            os.kill(pid, signal.SIGKILL)
        until(lambda: ran(world) == ["1", "1"], "it runs again")
        (world.root / "go").touch()
        _, err = run.communicate(timeout=120)
    assert run.returncode == 0
    assert "it ended in the middle of a run" in err


def test_a_client_that_is_ended_ends_its_run_with_the_script(world: World) -> None:
    """slurmd that gives a prolog up kills what it started, which is the client."""
    world.script("prolog.d/10-x", f"#!/bin/sh\necho $$ > {world.root}/pid\nexec sleep 600\n")
    with resident(world) as runner:
        run, pid = world.start("prolog"), world.root / "pid"
        until(lambda: pid.exists() and pid.read_text(), "the script runs")
        run.kill()
        run.communicate(timeout=120)
        until(lambda: not alive(int(pid.read_text())), "the script is ended")
        until(lambda: not children(runner), "and who ran it")


def test_runs_across_publishes_are_each_of_one_commit(world: World) -> None:
    layout, commits = Layout(world.root / "sync", world.tree), ["a" * 40, "b" * 40]
    layout.leases.mkdir()
    for commit in commits:
        layout.lease(commit).touch()
        for name in ("10-a", "20-b"):
            path = layout.tree(commit) / "prolog.d" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\necho {commit} $MINIVM_SCRIPTS_COMMIT >> {world.root}/of-$SLURM_JOB_ID\n")
            path.chmod(0o755)
    jobs = [str(job) for job in range(60)]
    with resident(world):
        runs = []
        for job in jobs:
            link = layout.root / "next"
            link.symlink_to(f"trees/{commits[int(job) % 2]}")
            link.rename(layout.current)
            runs.append(world.start("prolog", SLURM_JOB_ID=job))
        for run in runs:
            run.communicate(timeout=300)
            assert run.returncode == 0
    said = [(world.root / f"of-{job}").read_text().split() for job in jobs]
    assert all(len(words) == 4 and len(set(words)) == 1 for words in said), said
    assert {words[0] for words in said} == set(commits)
    assert len(world.records()) == len(jobs)


def test_a_run_holds_the_commit_that_was_current_when_it_began(world: World) -> None:
    layout, commits = Layout(world.root / "sync", world.tree), ["a" * 40, "b" * 40]
    layout.leases.mkdir()
    for commit in commits:
        layout.lease(commit).touch()
        path = layout.tree(commit) / "prolog.d/10-x"
        path.parent.mkdir(parents=True)
        path.write_text(WAITS.format(root=world.root) + f"echo $MINIVM_SCRIPTS_COMMIT >> {world.root}/of\n")
        path.chmod(0o755)

    def held(commit: str) -> bool:
        with layout.lease(commit).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    layout.current.symlink_to(f"trees/{commits[0]}")
    with resident(world) as runner:
        run = world.start("prolog")
        until(lambda: ran(world) == ["42"], "the script runs")
        (layout.root / "next").symlink_to(f"trees/{commits[1]}")
        (layout.root / "next").rename(layout.current)
        until(lambda: [held(commit) for commit in commits] == [True, False], "it holds its own")
        (world.root / "go").touch()
        assert (run.communicate(timeout=120), run.returncode) == (("", ""), 0)
        until(lambda: not children(runner), "it is over")
        until(lambda: not held(commits[0]), "and nobody holds it after that")
    assert (world.root / "of").read_text().split() == [commits[0]]


def call(world: World) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(30)
    client.connect(str(world.root / "runner/socket"))
    return client


def as_user(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/python3", "-IS", "-c", script, *arguments],
        user=USER,
        group=USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nobody_but_root_reaches_the_runner(world: World) -> None:
    connect = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nprint(len(s.recv(1)))"
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    with resident(world):
        folder = world.root / "runner"
        assert (folder.stat().st_mode & 0o777, (folder / "socket").stat().st_mode & 0o777) == (0o700, 0o600)
        assert "PermissionError" in as_user(connect, str(folder / "socket")).stderr
        # And were the door open, he would still be sent away.
        for place in (folder / "socket", *(folder / "socket").parents[:-1]):
            place.chmod(0o777 if place.name in ("runner", "socket") else place.stat().st_mode | 0o011)
        assert as_user(connect, str(folder / "socket")).stdout == "0\n"
        assert world.run("prolog")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 1000,
        b"minivm 1 task_prolog 2\nA\0",
        b"minivm 1 prolog 99999999999\n",
        b"minivm 1 prolog 3\nA=1",
        b"minivm 1 prolog 2\nA\0more",
        b"minivm 1 prolog \xff\n",
    ],
)
def test_what_is_no_request_is_refused_and_costs_nobody_else(world: World, text: bytes) -> None:
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    with resident(world) as runner, call(world) as client:
        client.sendall(text)
        assert client.recv(100) == b""
        assert world.run("prolog") == (0, "", "")
        assert runner.poll() is None
    assert ran(world) == ["42"]


def test_a_client_that_sends_nothing_is_closed_and_delays_no_run(world: World) -> None:
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    with resident(world), call(world) as silent:
        assert world.run("prolog") == (0, "", "")
        assert silent.recv(100) == b""
    assert ran(world) == ["42"]


def test_a_run_that_nobody_says_go_to_is_not_done(world: World) -> None:
    world.script("prolog.d/10-x", COUNT.format(root=world.root))
    with resident(world) as runner:
        with call(world) as client:
            client.sendall(b"minivm 1 prolog 0\n")
            assert client.recv(1) == b"A"
        until(lambda: not children(runner), "the run is given up")
    assert ran(world) == []


def test_a_script_has_nothing_of_the_runner_s(world: World) -> None:
    shutil_tree(world)
    world.script("prolog.d/10-x", f"#!/bin/bash\nls -l /proc/self/fd > {world.root}/fds\nenv > {world.root}/env\n")
    with resident(world):
        assert world.run("prolog", SLURM_JOB_UID=str(USER))[0] == 0
    links = [line.split(" -> ")[1] for line in (world.root / "fds").read_text().splitlines() if " -> " in line]
    assert sorted(link.partition(":")[0].partition("/fd")[0] for link in links) == sorted(
        ["/dev/null", f"{world.root}", "pipe", f"/proc/{links[-1].split('/')[2]}"]
    )
    assert "NOTIFY_SOCKET" not in (world.root / "env").read_text()


def shutil_tree(world: World) -> None:
    """Install the library of the image's scripts, as generation zero has it."""
    lib = Path(__file__).resolve().parents[3] / "scripts/lib/jobs.py"
    world.script("lib/jobs.py", lib.read_text(), 0o644)


SAYS = "#!/usr/bin/python3 -IS\nimport os\nopen({place!r}, 'w').write(open('/proc/self/cmdline').read())\n"


def test_only_what_the_image_brings_runs_without_an_interpreter_of_its_own(world: World) -> None:
    """A site's script is a program, also where it is called as one of the image's."""
    layout, commit = Layout(world.root / "sync", world.tree), "a" * 40
    shutil_tree(world)
    for name in ("10-same", "20-changed"):
        world.script(f"prolog.d/{name}", SAYS.format(place=f"{world.root}/{name}"))
    layout.leases.mkdir()
    layout.lease(commit).touch()
    subprocess.run(["cp", "-r", str(world.tree), str(layout.root / "tree")], check=True)
    layout.trees.mkdir()
    (layout.root / "tree").rename(layout.tree(commit))
    changed = layout.tree(commit) / "prolog.d/20-changed"
    changed.write_text(changed.read_text() + "# by a site\n")
    layout.current.symlink_to(f"trees/{commit}")
    with resident(world):
        assert world.run("prolog")[0] == 0
    assert "health.runner" in (world.root / "10-same").read_text()
    assert "prolog.d/20-changed" in (world.root / "20-changed").read_text()


def test_runs_leave_the_runner_as_large_as_it_was(world: World) -> None:
    shutil_tree(world)
    world.script("prolog.d/10-x", "#!/usr/bin/python3 -IS\n")

    def size() -> int:
        return int(Path(f"/proc/{runner.pid}/statm").read_text().split()[1])

    with resident(world) as runner:
        sizes = []
        for _ in range(3):
            for job in range(100):
                assert world.run("prolog", SLURM_JOB_ID=str(job))[0] == 0
            sizes.append(size())
        descriptors = os.listdir(f"/proc/{runner.pid}/fd")  # noqa: PTH208  # of /proc
    assert sizes[2] - sizes[1] <= 16, f"{sizes} pages"
    assert len(descriptors) < 12


CHECK = """
from health.api import Builtin, Check, Class, When, problem
CHECK = Check(name="{name}", about="x", class_=Class.NODE, period_s=3600, sources=(), thresholds="",
              when=frozenset({{{when}}}), hardware=__import__("health.api").api.Hardware.ANY)
def parse(inputs): return None
def judge(measured, context): return [__import__("health.api").api.ok("fine")]
"""


def test_one_look_at_the_node_serves_all_jobs_that_have_ended(world: World) -> None:
    world.script("health.d/one.py", CHECK.format(name="one", when="When.EPILOG, When.BACKGROUND"), 0o644)
    with resident(world):
        for job in range(8):
            assert world.run("epilog", SLURM_JOB_ID=str(job)) == (0, "", "")
        until(lambda: any(entry["kind"] == "after" for entry in world.records()), "the node is looked at")
    records = world.records()
    assert [entry["kind"] for entry in records].count("epilog") == 8
    after = next(entry for entry in records if entry["kind"] == "after")
    assert after["checks"] == {"fresh": 0, "ran": 1}, after
    assert world.verdict("one")["result"] == "ok"


def test_a_runner_that_is_killed_before_the_look_after_a_job_leaves_it_to_the_next(world: World) -> None:
    world.script("health.d/one.py", CHECK.format(name="one", when="When.EPILOG, When.BACKGROUND"), 0o644)
    with resident(world) as runner:
        assert world.run("epilog") == (0, "", "")
        runner.kill()
        runner.wait()
        assert not any(entry["kind"] == "after" for entry in world.records()), "it looks a second later"
        # A killed one removes nothing; `resident` clears up after the tests.
        assert (world.root / "runner/socket").exists()
        with resident(world):
            until(lambda: any(entry["kind"] == "after" for entry in world.records()), "the node is looked at")


def test_a_job_that_failed_is_asked_about_after_its_epilog_unless_the_policy_switches_it_off(world: World) -> None:
    """There is no slurmctld here: the epilog is as good, and the record says why the output has no note."""
    failed = {"SLURM_JOB_UID": str(USER), "SLURM_JOB_GID": str(USER), "SLURM_JOB_EXIT_CODE": "256"}
    here = {"SLURM_JOB_NODELIST": "w[0-3]", "SLURMD_NODENAME": "w0"}
    other = here | {"SLURMD_NODENAME": "w1"}
    with resident(world):
        world.policy(runner={"notes_failures": False})
        assert world.run("epilog", **failed, **here, SLURM_JOB_ID="40") == (0, "", "")
        world.policy()
        assert world.run("epilog", **failed, **other, SLURM_JOB_ID="41") == (0, "", "")
        assert world.run("epilog", **failed, **here, SLURM_JOB_ID="42") == (0, "", "")
        until(lambda: any(entry["kind"] == "note" for entry in world.records()), "slurmctld was asked")
    (note,) = [entry for entry in world.records() if entry["kind"] == "note"]
    assert (note["told"], list(note["skipped"])) == ([], ["42"]), note


def test_a_job_s_black_box_is_written_by_either_runner_kept_for_days_and_can_be_switched_off(world: World) -> None:
    boxes = world.root / "log/boxes"

    def run(job: str) -> list[str]:
        for kind in ("prolog", "epilog"):
            assert world.run(kind, SLURM_JOB_ID=job) == (0, "", "")
        return sorted(path.name for path in boxes.iterdir())

    world.script("health.d/_none", "", 0o644)
    clients, world.clients = world.clients, None
    assert run("40") == ["40.61234.jsonl"], "a Python of its own"
    world.clients = clients
    with resident(world):
        assert run("41") == ["40.61234.jsonl", "41.61234.jsonl"]
        kinds = [entry["kind"] for entry in black_box.parse_lines((boxes / "41.61234.jsonl").read_bytes())]
        assert kinds == ["begin", "end"]
        world.policy(runner={"box_days": 3})
        os.utime(boxes / "40.61234.jsonl", (1, 1))
        run("43")
        until(lambda: not (boxes / "40.61234.jsonl").exists(), "the old box goes in the round after a job")
        assert (boxes / "41.61234.jsonl").exists()
        world.policy(runner={"box_days": 0})
        assert "42.61234.jsonl" not in run("42")
        until(lambda: not list(boxes.iterdir()), "all go where none are kept")


LOOKS = """
import os
from health.api import Check, Class, When, ok
CHECK = Check(name="one", about="x", class_=Class.NODE, period_s=3600, sources=(), thresholds="",
              when=frozenset({{When.EPILOG}}))
def parse(inputs):
    fds = [os.readlink(f"/proc/self/fd/{{fd}}").partition(":")[0] for fd in range(3)]
    # Beside these: where its answer goes, the lock of rounds, and this directory.
    more = [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 5]
    print(*fds, more, "NOTIFY_SOCKET" in os.environ, os.environ["MINIVM_KIND"], file=open({place!r}, "w"))
    print(open("/proc/self/cmdline").read(), file=open({place!r}, "a"))
def judge(measured, context): return [ok("fine")]
"""


def test_the_look_after_jobs_starts_no_interpreter_and_has_nothing_of_the_runner_s(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = world.root / "seen"
    monkeypatch.setitem(world.environment_extra, "NOTIFY_SOCKET", "/nowhere")
    world.script("health.d/one.py", LOOKS.format(place=str(place)), 0o644)
    with resident(world):
        assert world.run("epilog") == (0, "", "")
        until(lambda: any(entry["kind"] == "after" for entry in world.records()), "the node is looked at")
    seen, who = place.read_text().splitlines()
    assert seen == "/dev/null pipe pipe [] False epilog"
    assert who.endswith("-m\0health.runner\0"), who


# The task prolog, as the job's user.


@pytest.fixture
def planned(world: World) -> Iterator[World]:
    """Make a plan, and a task prolog with no Python to fall back on: without the plan it does nothing and says so."""
    world.script("task_prolog.d/10-env", "#!/bin/sh\necho export ME=$(id -u)\necho noise\nenv > $MINIVM_TEST_ENV\n")
    program = world.root / "clients/task_prolog"
    text = program.read_bytes()
    python = sys.executable.encode()
    program.write_bytes(text.replace(python, b"/" + b"x" * (len(python) - 1)))
    with resident(world):
        yield world


def task(world: World, **extra: str) -> tuple[int, str, str]:
    # Each time: another session of pytest keeps the directory that they share to root.
    for above in [*world.root.parents][:-1]:
        above.chmod(above.stat().st_mode | 0o011)
    place = world.root / "env"
    place.touch()
    place.chmod(0o666)
    done = subprocess.run(
        [str(world.root / "clients/task_prolog")],
        env={**world.environment, "MINIVM_TEST_ENV": str(place), **extra},
        user=USER,
        group=USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_task_prolog_follows_the_plan_as_its_user(planned: World) -> None:
    code, out, err = task(planned, HOME="/home/a", NCCL_DEBUG="INFO", BASH_ENV="/x", OTHER="1")
    assert (code, out, err) == (0, f"export ME={USER}\n", "")
    said = dict(line.split("=", 1) for line in (planned.root / "env").read_text().splitlines() if "=" in line)
    assert said["MINIVM_SCRIPTS_COMMIT"] == "zero"
    assert said["MINIVM_SCRIPTS_TREE"] == str(planned.tree)
    assert (said["HOME"], said["NCCL_DEBUG"], said["MINIVM_UNFIT"]) == ("/home/a", "INFO", "80")
    assert (said["MINIVM_JOB_ENV_OTHER"], said["MINIVM_JOB_ENV_BASH_ENV"]) == ("1", "/x")
    assert not {"OTHER", "BASH_ENV", "SECRET_OF_SLURMD"} & said.keys()
    assert said["PATH"].startswith("/usr/local/sbin:")


@pytest.mark.parametrize("by", ["its plan", "a Python of its own"])
def test_a_script_about_a_variable_is_started_for_tasks_with_it(planned: World, by: str) -> None:
    about = planned.script("task_prolog.d/20-about", "#!/bin/sh\n# minivm: only with ABOUT\necho export ABOUT=$$\n")
    assert planned.run("prolog")[0] == 0, "the runner looks at what has changed"

    def said(**environment: str) -> str:
        if by == "its plan":
            return task(planned, **environment)[1]
        planned.clients = None
        return planned.run("task_prolog", MINIVM_TEST_ENV="/dev/null", **environment)[1]

    assert "ABOUT=" not in said() and "ABOUT=" not in said(ABOUT="") and "ABOUT=" not in said(MINIVM_JOB_ENV_ABOUT="1")
    assert "export ABOUT=" in said(ABOUT="1")
    if by == "its plan":
        # In place, as no commit is ever changed: what it says of itself is part of what the plan rests on.
        about.write_text("#!/bin/sh\n")
        assert "cannot run the task prolog" in task(planned)[2]


def test_a_task_prolog_that_breaks_hangs_or_refuses_is_as_ever(planned: World) -> None:
    planned.policy(
        runner={
            "scripts": {"task_prolog.d/20-hangs": {"deadline_s": 2.5}, "task_prolog.d/30-stops": {"broken": "fail"}}
        }
    )
    planned.script("task_prolog.d/15-breaks", "#!/bin/sh\necho export B=1\nexit 5\n")
    planned.script(
        "task_prolog.d/20-hangs", f"#!/bin/bash\nsleep 600 & echo $! > {planned.root}/env\ntrap '' TERM\nwait; wait\n"
    )
    assert planned.run("prolog")[0] == 0, "the runner looks at what has changed"
    assert task(planned)[:2] == (0, f"export ME={USER}\n")
    assert not alive(int((planned.root / "env").read_text()))
    (planned.tree / "task_prolog.d/20-hangs").unlink()
    planned.script("task_prolog.d/30-stops", "#!/bin/sh\necho why >&2; exit 3\n")
    assert planned.run("prolog")[0] == 0
    code, _, err = task(planned)
    assert (code, err) == (1, "task_prolog.d/30-stops: exit 3: why\n\n")
    planned.script("task_prolog.d/05-no", "#!/bin/sh\necho refuse not here\n")
    assert planned.run("prolog")[0] == 0
    assert task(planned)[:2] == (1, "print minivm: not here\n")


@pytest.mark.parametrize("change", ["a commit", "a script", "a policy", "half a plan", "a user's plan", "no plan"])
def test_a_plan_of_before_is_not_followed(planned: World, change: str) -> None:
    assert task(planned)[1] == f"export ME={USER}\n"
    plan = planned.root / "task_prolog.plan"
    match change:
        case "a commit":
            Layout(planned.root / "sync").current.symlink_to("trees/" + "a" * 40)
        case "a script":
            planned.script("task_prolog.d/20-more", "#!/bin/sh\n")
        case "a policy":
            planned.policy(runner={"task_prolog": {"deadline_s": 1}})
        case "half a plan":
            plan.write_text(plan.read_text()[:-4])
        case "a user's plan":
            os.chown(plan, USER, USER)
        case "no plan":
            plan.unlink()
    _, out, err = task(planned)
    assert out == ""
    assert "cannot run the task prolog" in err
