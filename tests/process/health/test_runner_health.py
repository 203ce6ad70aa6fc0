"""Rounds of checks on this machine: what is read, what is written, what a prolog makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from health.api import Command, Failure, Files
from health.checks import builtin as health_builtin
from health.checks import loop as health_loop
from health.checks.builtin import mounts, processes
from health.checks.cases import Case, judge_case, read_case
from health.checks.collect import collect
from health.checks.load import load_checks
from health.places import boot_id
from health.rounds import read_index
from tests.process.living import alive
from tests.process.runner_world import World, make
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
CHECK = """
from health.api import *
CHECK = Check(name={name!r}, about="a test's", class_=Class.{class_}, period_s={period}, expires_s={expires},
              when=frozenset({when}),
              sources=(Files("f", ("{root}/fact*",)),), thresholds="t")
def parse(inputs):
    lines = inputs["f"].split()
    return lines[-1]
def judge(measured, context):
    context.state["seen"] = context.previous.get("seen", 0) + 1
    return [ok("fine")] if measured == "good" else [problem("it is " + measured, subject="thing")]
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make(tmp_path)
    made.script("lib/thresholds/t.json", '{"default": {}}', 0o644)
    (tmp_path / "fact").write_text("good\n")
    return made


def add(world: World, name: str, *, class_: str = "NODE", period: float = 60, when: str = "[When.PROLOG]") -> None:
    text = CHECK.format(
        name=name, class_=class_, period=period, expires=max(150, 2.5 * period), when=when, root=world.root
    )
    world.script(f"health.d/{name}.py", text, 0o644)


def health(world: World, *arguments: str) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(world.tree), "--commit", "zero", *arguments],
        env=world.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {item["check"]: item for item in json.loads(done.stdout)["ran"]}


def cli(world: World, *arguments: str, **extra: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "health.cli", *arguments],
        env={**world.environment, **extra},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# The collector.


def test_a_program_that_hangs_costs_its_deadline_and_no_more(tmp_path: Path) -> None:
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/bash\necho before\nsleep 600 & echo $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    found = collect([Command("a", (str(script),), deadline_s=3.0), Command("b", ("true",))])
    assert found["a"].failure is Failure.TIMEOUT
    assert "did not answer within 3 s" in found["a"].why
    assert found["b"].failure is None
    until(lambda: not alive(int((tmp_path / "pid").read_text())), "its child has been killed too")


@pytest.fixture
def crowd() -> Iterator[int]:
    """Keep a processor busy with processes in sessions of their own, as the kernel may share by sessions."""
    cpu = min(os.sched_getaffinity(0))
    hog = ["taskset", "-c", str(cpu), "sh", "-c", "echo; while :; do :; done"]
    hogs = [subprocess.Popen(hog, stdout=subprocess.PIPE, start_new_session=True) for _ in range(12)]
    for started in hogs:
        assert started.stdout is not None and started.stdout.readline()
    yield cpu
    for started in hogs:
        started.kill()
        started.communicate()


def test_a_program_that_is_not_let_run_does_not_hang(tmp_path: Path, crowd: int) -> None:
    """A job that takes every processor must not make a driver look hung, which drains the node."""
    argv = ("taskset", "-c", str(crowd), "sh", "-c", "while :; do :; done")
    found = collect([Command("starved", argv, deadline_s=1.5)])
    assert found["starved"].failure is Failure.FAILED and "for a processor" in found["starved"].why


def test_mounts_that_nobody_came_to_ask_are_not_called_hung(crowd: int) -> None:
    asking = f"import os\nos.sched_setaffinity(0, [{crowd}])\n{HUNG}"
    for old, new in (("time.sleep(600)", "while True: pass"), ("mounts().text", "mounts().why"), ("3.0", "1.5")):
        assert old in asking
        asking = asking.replace(old, new)
    done = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, timeout=120, check=True)
    assert "for a processor" in done.stdout


def test_a_program_that_is_not_installed_is_missing(tmp_path: Path) -> None:
    found = collect([Command("a", ("no-such-tool", "-q")), Files("b", (f"{tmp_path}/none*",))])
    assert (found["a"].failure, found["a"].why) == (Failure.MISSING, "no-such-tool is not installed")
    assert found["b"].failure is Failure.MISSING


def test_a_flood_is_told_as_cut() -> None:
    found = collect([Command("a", ("head", "-c", "9000000", "/dev/zero"))])
    assert found["a"].failure is Failure.TRUNCATED


def test_an_exit_code_that_is_no_answer_is_a_failure() -> None:
    found = collect([Command("a", ("ls", "/nonexistent")), Command("b", ("ls", "/nonexistent"), accept=())])
    assert found["a"].failure is Failure.FAILED
    assert "exited 2" in found["a"].why
    assert found["b"].failure is None
    assert found["b"].code == 2


def test_a_program_for_each_path(tmp_path: Path) -> None:
    for name in ("x1", "x2"):
        (tmp_path / name).write_text(f"of {name}")
    found = collect([Command("a", ("cat",), each=f"{tmp_path}/x[0-9]")])
    assert found["a"].text == f"==> {tmp_path}/x1 <==\nof x1\n==> {tmp_path}/x2 <==\nof x2"


def test_this_process_is_in_the_list_of_processes() -> None:
    text = processes().text
    assert any(line.startswith(f"{os.getpid()} ") for line in text.splitlines())


ROOT_TYPE = next(row.split()[2] for row in Path("/proc/self/mounts").read_text().splitlines() if row.split()[1] == "/")
HUNG = f"""
import os, sys, threading, time
import health.checks.builtin as builtin
builtin.NETWORK_FILE_SYSTEMS = {{{ROOT_TYPE!r}}}
real = os.statvfs
def slow(path):
    if path == "/":
        time.sleep(600)
    return real(path)
os.statvfs = slow
builtin.MOUNT_DEADLINE_S = 3.0
start = time.monotonic()
text = builtin.mounts().text
print(text)
print("took", time.monotonic() - start)
"""


def test_a_mount_that_does_not_answer_is_called_hung_after_its_deadline() -> None:
    """The call is stopped in user space here; on a dead server the kernel holds it, and the asking child with it."""
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=120, check=True)
    assert "hung - " in done.stdout
    assert next(line for line in done.stdout.splitlines() if line.startswith("hung")).endswith(" /")


def test_who_hangs_on_a_mount_holds_no_lock_of_rounds(tmp_path: Path) -> None:
    code = f"""
import json, os
import health.checks.builtin as builtin
from health.checks.round import one_round
from health.places import Places
from pathlib import Path
builtin.ABANDONED_MOUNTS = Path({str(tmp_path / "abandoned")!r})
# As the kernel does with a child that waits for a server: no signal ends it.
real, builtin.os.kill = os.kill, lambda *_: None
{HUNG}
"""
    code = code.replace("text = builtin", "with one_round(places, 0.0) as first:\n    text = builtin")
    code = code.replace("start = time", f"places = Places(state=Path({str(tmp_path)!r}))\nstart = time")
    code += """
child = int(next(iter(json.loads(builtin.ABANDONED_MOUNTS.read_text()))).split()[0])
with one_round(places, 0.0) as second:
    print("alone:", first, second, "still hangs:", Path(f"/proc/{child}").exists())
real(child, 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "alone: True True still hangs: True\n" in done.stdout, done.stdout + done.stderr


# Two mounts, of which each begins to hang in its own time; and what waits for a server takes no signal.
ONE_BY_ONE = """
import os, time
from pathlib import Path
import health.checks.builtin as builtin
left, hang = [], set()
real = os.kill
builtin.os.kill = lambda pid, number: left.append(pid)
builtin.os.statvfs = lambda path: time.sleep(600 if path in hang else 0)
join = builtin.threading.Thread.join
builtin.threading.Thread.join = lambda thread, within: time.sleep(600) if hang else join(thread, within)
builtin.MOUNT_DEADLINE_S, builtin.ABANDONED_MOUNTS, builtin.MOUNTS = 2.0, Path("abandoned"), Path("table")
builtin.MOUNTS.write_text("a:/ /one nfs rw 0 0\\nb:/ /two nfs rw 0 0\\n")
def lives(pid):
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
for now in ({"/one"}, {"/one", "/two"}, {"/one", "/two"}, {"/one", "/two"}):
    hang |= now
    said = sorted(line.split()[-1] for line in builtin.mounts().text.splitlines() if line.startswith("hung"))
    alive = [pid for pid in left if lives(pid)]
    print(said, len(alive))
for pid in alive:
    real(pid, 9)
    os.waitpid(pid, 0)
hang.clear()
print([line.split()[0] for line in builtin.mounts().text.splitlines()[1:3]], builtin.ABANDONED_MOUNTS.exists())
"""


def test_mounts_that_hang_one_after_the_other_hold_one_child_each(tmp_path: Path) -> None:
    """Each child that hangs is one that cannot be ended: a round that left another each time would fill the node."""
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    both = "['/one', '/two'] 2"
    assert done.stdout.splitlines() == ["['/one'] 1", both, both, both, "['ok', 'ok'] False"], done.stderr


def test_a_process_that_got_the_number_of_one_that_hung_is_not_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mount that answers would be called hung for as long as that process lives, and the node would drain."""
    monkeypatch.setattr(health_builtin, "NETWORK_FILE_SYSTEMS", {ROOT_TYPE})
    monkeypatch.setattr(health_builtin, "ABANDONED_MOUNTS", mark := tmp_path / "abandoned")
    for text in (f"{os.getpid()}\n/", f'{{"{os.getpid()} 1": ["/"]}}', '{"1": 7}', f'{{"x {os.getpid()}": ["/"]}}'):
        mark.write_text(text)
        line = next(line for line in mounts().text.splitlines() if line.endswith(" /") and line[:5] != "other")
        assert line.startswith("ok "), text
        assert not mark.exists(), "what says nothing more is not kept"


def test_a_mount_that_answers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_builtin, "NETWORK_FILE_SYSTEMS", {ROOT_TYPE})
    line = next(line for line in mounts().text.splitlines() if line.endswith(" /") and not line.startswith("other"))
    assert line.startswith("ok ")


# Rounds.


def test_a_file_system_that_a_user_serves_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user's file system may never answer, or refuse root; neither says anything about the node."""
    table = tmp_path / "mounts"
    table.write_text(
        "me@host: /home/me/far fuse.sshfs rw,nosuid,nodev,relatime,user_id=20001,group_id=20001 0 0\n"
        f"bucket {tmp_path} fuse.juicefs rw,relatime,user_id=0,group_id=0,allow_other 0 0\n"
    )
    monkeypatch.setattr(health_builtin, "MOUNTS", table)
    rows = mounts().text.splitlines()
    assert "other - fuse.sshfs /home/me/far" in rows
    assert [row for row in rows if row.startswith("ok ")] and rows[-1] == "# end: 1 asked"


BLANKS = ("\u2003", "\v", "\x1c", "\x85", "\u2028")


@pytest.mark.parametrize("blank", BLANKS)
def test_a_user_s_mount_is_no_other_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blank: str) -> None:
    """The kernel writes of these blanks none as a number, and the name of a FUSE mount is its user's."""
    table = tmp_path / "mounts"
    forged = blank.join(("me", "/no/such/data", "nfs4", "rw", "x"))
    mine = "rw,nosuid,nodev,user_id=20001,group_id=20001 0 0"
    path = f"/home/me/a{blank}b\\012hung"
    table.write_text(f"{forged} {path} fuse.sshfs {mine}\nx /data tmpfs rw 0 0\n")
    monkeypatch.setattr(health_builtin, "MOUNTS", table)
    case = Case(tmp_path, {"mounts": mounts()})
    got = judge_case(load_checks(ROOT / "scripts", ["mounts"]).checks["mounts"], ROOT / "scripts", case).verdict
    assert (got.result, got.reason) == ("ok", "no network file system is mounted")


def test_a_round_writes_a_verdict_for_each_check_and_an_index(world: World) -> None:
    add(world, "one")
    add(world, "two", when="[When.BACKGROUND]")
    assert health(world, "--when", "prolog") == {
        "one": {"check": "one", "result": "ok", "reason": "fine", "broken": ""},
    }
    verdict = world.verdict("one")
    assert verdict["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (verdict["commit"], verdict["class"], verdict["subject"]) == ("zero", "node", "host")
    assert verdict["expires"] - verdict["at"] == pytest.approx(150)
    index = json.loads((world.root / "health/index.json").read_text())
    assert set(index["checks"]) == {"one", "two"}


def test_a_broken_check_is_unknown_and_spoils_no_other(world: World) -> None:
    add(world, "good")
    world.script("health.d/crashes.py", (world.tree / "health.d/good.py").read_text().replace("'good'", "'crashes'"))
    world.script("health.d/crashes.py", (world.tree / "health.d/crashes.py").read_text() + "\ndef judge(m, c): 1 / 0\n")
    world.script("health.d/hangs.py", (world.tree / "health.d/good.py").read_text().replace("'good'", "'hangs'"))
    world.script(
        "health.d/hangs.py",
        (world.tree / "health.d/hangs.py").read_text().replace("thresholds", "deadline_s=0.2, thresholds")
        + "\ndef parse(inputs):\n    while True: pass\n",
    )
    world.script("health.d/typo.py", "def x(:\n")
    said = health(world, "--when", "prolog")
    assert said["good"]["result"] == "ok"
    assert said["crashes"] == {
        "check": "crashes",
        "result": "unknown",
        "reason": "the check is broken: ZeroDivisionError: division by zero",
        "broken": "ZeroDivisionError: division by zero",
    }
    assert said["hangs"]["broken"] == "no judgement within 0.2 s"
    assert "SyntaxError" in said["typo"]["broken"]
    index = read_index(world.root / "health/index.json")
    assert index is not None and "typo" in index.checks, "it is broken, and not gone: what it has drained stays"


def test_a_check_remembers_until_the_next_boot(world: World) -> None:
    add(world, "one")
    for _ in range(2):
        health(world, "--when", "prolog")
    path = world.root / "health/memory/one.json"
    assert json.loads(path.read_text())["state"] == {"seen": 2}
    path.write_text(json.dumps({"boot_id": "another", "state": {"seen": 99}}))
    health(world, "--when", "prolog")
    assert json.loads(path.read_text())["state"] == {"seen": 1}


def test_only_what_is_due_runs_in_the_background(world: World) -> None:
    add(world, "often", period=0.001, when="[When.BACKGROUND]")
    add(world, "rarely", period=3600, when="[When.BACKGROUND]")
    assert set(health(world, "--when", "background", "--due")) == {"often", "rarely"}
    assert set(health(world, "--when", "background", "--due")) == {"often"}


def test_a_check_in_another_language_answers_by_its_exit_code(world: World) -> None:
    header = '# minivm-check: {"about": "x", "class": "manual", "period_s": 60, "when": ["prolog"]}'
    for name, code in (("fine", "0"), ("sick", '"$MINIVM_UNFIT"'), ("broken", "3")):
        world.script(f"health.d/{name}", f"#!/bin/sh\n{header}\necho it is {name}\nexit {code}\n")
    world.script("health.d/README", "not a check\n", 0o644)
    said = health(world, "--when", "prolog")
    assert {name: item["result"] for name, item in said.items()} == {
        "fine": "ok",
        "sick": "problem",
        "broken": "unknown",
    }
    assert world.verdict("sick")["reason"] == "it is sick"
    assert world.verdict("sick")["class"] == "manual"


def test_an_incident_leaves_one_capsule_that_replays_to_the_same_verdict(world: World) -> None:
    add(world, "one")
    (world.root / "fact").write_text("bad\n")
    health(world, "--when", "prolog")
    health(world, "--when", "prolog")
    (capsule,) = (world.root / "capsules").iterdir()
    assert world.verdict("one")["evidence"] == str(capsule)
    assert read_case(capsule).captures["f"].text.split()[-1] == "bad"
    code, out, _ = cli(world, "replay", str(capsule), "--tree", str(world.tree), "--json")
    assert code == 2
    assert [(item["check"], item["result"], item["reason"]) for item in json.loads(out)] == [
        ("one", "problem", "it is bad")
    ]
    packed = world.root / "capsule.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(capsule, capsule.name)
        stray = tarfile.TarInfo(f"{capsule.name}/../../stray.txt")
        archive.addfile(stray)
    assert cli(world, "replay", str(packed), "--tree", str(world.tree), TMPDIR=str(world.root))[0] == 2
    assert not list(world.root.rglob("stray.txt"))


# The prolog's look at verdicts.


def test_a_prolog_takes_fresh_verdicts_and_runs_nothing(world: World) -> None:
    add(world, "one")
    health(world, "--when", "prolog")
    world.run("prolog")
    assert world.records()[-1]["checks"] == {"fresh": 1, "ran": 0}


@pytest.mark.parametrize("what", ["no index", "expired", "another boot", "another commit", "no verdict"])
def test_a_prolog_runs_what_is_not_fresh(world: World, what: str) -> None:
    add(world, "one")
    health(world, "--when", "prolog")
    verdict, index = world.root / "verdicts/one.json", world.root / "health/index.json"
    if what == "no index":
        index.unlink()
    elif what == "expired":
        verdict.write_text(json.dumps({**json.loads(verdict.read_text()), "expires": time.time() - 1}))
    elif what == "another boot":
        verdict.write_text(json.dumps({**json.loads(verdict.read_text()), "boot_id": "other"}))
    elif what == "another commit":
        index.write_text(json.dumps({**json.loads(index.read_text()), "commit": "f" * 40}))
    else:
        verdict.unlink()
    (world.root / "fact").write_text("bad\n")
    assert world.run("prolog")[0] == 0, "nobody confirms it"
    checks = world.records()[-1]["checks"]
    assert (checks["fresh"], checks["ran"]) == (0, 1)
    assert checks["problems"] == {"one": "it is bad"}


def test_a_problem_of_the_user_s_stops_no_job(world: World) -> None:
    add(world, "one", class_="USER")
    (world.root / "fact").write_text("bad\n")
    world.policy(gate={"wait_s": 0.1, "unconfirmed": "fail"})
    assert world.run("prolog")[0] == 0
    assert world.records()[-1]["checks"]["problems"] == {"one": "it is bad"}


def test_an_epilog_looks_again_whatever_the_verdicts_say(world: World) -> None:
    add(world, "one", when="[When.EPILOG]")
    health(world, "--when", "epilog")
    (world.root / "fact").write_text("bad\n")
    assert world.run("epilog")[0] == 0
    assert world.records()[-1]["checks"]["problems"] == {"one": "it is bad"}


def test_a_check_that_breaks_is_told_and_stops_no_job(world: World) -> None:
    world.script("health.d/typo.py", "def x(:\n")
    world.policy(gate={"wait_s": 0.1, "unconfirmed": "fail"})
    assert world.run("prolog")[0] == 0
    assert "SyntaxError" in world.records()[-1]["checks"]["fault"]
    assert world.verdict("scripts_prolog")["class"] == "user"


def test_the_health_program_runs_the_background_round(world: World) -> None:
    add(world, "one", when="[When.BACKGROUND]")
    assert world.run("health")[0] == 0
    assert world.verdict("one")["result"] == "ok"


def test_the_health_program_asks_slurmd_nothing_since_slurmd_waits_for_it(world: World) -> None:
    add(world, "one", when="[When.BACKGROUND]")
    text = (world.tree / "health.d/one.py").read_text().replace("'one'", "'two'")
    source = 'Command("s", ("scontrol", "show", "slurmd"), accept=()),'
    text = text.replace("sources=(", f"judges_failures=True, sources=({source} ")
    world.script("health.d/two.py", text, 0o644)
    assert world.run("health")[0] == 0
    assert world.verdict("one")["result"] == "ok"
    assert not (world.root / "verdicts/two.json").exists()
    assert "two" in health(world, "--when", "background"), "the service of the init asks"


def test_what_was_promised_to_the_pod_reaches_a_prolog_without_its_environment(world: World) -> None:
    add(world, "one")
    text = (world.tree / "health.d/one.py").read_text()
    world.script("health.d/one.py", text.replace("sources=(", "hardware=Hardware.GPU, sources=("), 0o644)
    assert health(world, "--when", "prolog") == {}, "this machine has no GPU, and was promised none"
    world.environment_extra["MINIVM_EXPECT_GPUS"] = "8"
    assert set(health(world, "--when", "prolog")) == {"one"}
    world.environment_extra.clear()
    assert set(health(world, "--when", "prolog")) == {"one"}


def test_a_published_tree_is_not_written_to(world: World) -> None:
    shutil.copytree(
        ROOT / "scripts/lib/parsers", world.tree / "lib/parsers", ignore=shutil.ignore_patterns("__pycache__")
    )
    add(world, "one")
    health(world, "--when", "prolog")
    assert not list(world.tree.rglob("__pycache__"))


# The services around it.


def test_a_verdict_dies_with_its_check(world: World) -> None:
    add(world, "a", when="[When.BACKGROUND]")
    add(world, "b", when="[When.BACKGROUND]")
    world.script("health.d/odd.py", "1 / 0", 0o644)
    health(world, "--when", "background")
    for script in ("prolog.10-x", "scripts_prolog", "odd"):
        shutil.copy(world.root / "verdicts/a.json", world.root / f"verdicts/{script}.json")
    (world.tree / "health.d/a.py").unlink()
    health(world, "--when", "prolog")
    assert (world.root / "verdicts/a.json").exists(), "a prolog may run an earlier commit"
    health(world, "--when", "background")
    left = sorted(path.stem for path in (world.root / "verdicts").glob("*.json"))
    assert left == ["b", "odd", "prolog.10-x", "scripts_prolog"]
    assert [path.stem for path in (world.root / "health/memory").glob("*.json")] == ["b"]


def test_forget_takes_a_check_s_word_back_and_tells_the_broker(world: World) -> None:
    add(world, "a", when="[When.BACKGROUND]")
    health(world, "--when", "background")
    code, _, err = cli(world, "health", "forget", "a")
    assert code == 3 and "the broker does not answer" in err
    assert not (world.root / "verdicts/a.json").exists()
    assert cli(world, "health", "forget", "../a")[0] == 3
    with broker(world) as asked:
        code, out, _ = cli(world, "health", "forget", "a")
    assert (code, asked) == (0, [{"ask": "forget", "checks": ["a"]}])
    assert "a is forgotten" in out and "clear: all is well" in out


@contextlib.contextmanager
def broker(world: World) -> Iterator[list[object]]:
    """Serve a broker that records its requests."""
    asked: list[object] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(world.root / "broker.sock"))
        listener.listen(1)

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                asked.append(json.loads(client.makefile().readline()))
                client.sendall(b'{"said": "clear: all is well"}\n')

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield asked
        thread.join(10)


def test_the_loop_makes_the_first_round_at_once_tells_readiness_and_stops_on_term(world: World) -> None:
    add(world, "one", period=0.01, when="[When.BACKGROUND, When.BOOT]")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(world.root / "notify"))
        notify.settimeout(PATIENCE)
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "health.checks.loop"],
            env={
                **world.environment,
                "NOTIFY_SOCKET": str(world.root / "notify"),
                "MINIVM_HEALTH_ROUND_SECONDS": "0.2",
            },
        )
        try:
            assert notify.recv(100) == b"READY=1"
            (world.root / "fact").write_text("bad\n")
            verdict, metrics = world.root / "verdicts/one.json", world.root / "health.prom"
            until(lambda: verdict.exists() and world.verdict("one")["result"] == "problem", "a round finds the problem")
            line = 'minivm_health_verdict{check="one",class="node"} 1'
            until(lambda: metrics.exists() and line in metrics.read_text(), "and measures it")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()


def test_a_new_loop_takes_back_what_a_killed_one_has_left_on_the_pod(world: World) -> None:
    """init keeps the condition of a process that died."""
    asked: list[dict[str, object]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(world.root / "control.sock"))
        listener.listen(8)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        asked.append(json.loads(client.makefile().readline()))
                        client.sendall(b'{"ok": true}\n')

        threading.Thread(target=serve, daemon=True).start()
        env = {**world.environment, "MINIVM_HEALTH_ROUND_SECONDS": "0.2"}
        process = subprocess.Popen([sys.executable, "-I", "-m", "health.checks.loop"], env=env)
        try:
            until(lambda: asked, "it tells init that there is no problem")
        finally:
            process.kill()
            process.wait()
    told = {"op": "condition", "name": "health", "text": "", "blocking": False}
    assert asked[0] == told and asked.count(told) == 1


def served(world: World, *answers: dict[str, object]) -> contextlib.AbstractContextManager[list[object]]:
    """Serve a broker that repeats its last answer."""

    @contextlib.contextmanager
    def serves() -> Iterator[list[object]]:
        asked: list[object] = []
        left = list(answers)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(world.root / "broker.sock"))
            listener.listen(8)

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        client, _ = listener.accept()
                        with client:
                            asked.append(json.loads(client.makefile().readline()))
                            client.sendall(json.dumps(left.pop(0) if left[1:] else left[0]).encode() + b"\n")

            threading.Thread(target=serve, daemon=True).start()
            yield asked

    return serves()


@pytest.mark.parametrize(
    ("fact", "when", "hardware", "state", "ran", "said"),
    [
        ("good", "[When.DEEP]", "ANY", "ok", 0, "one"),
        ("good", "[When.DEEP]", "GPU", "ok", 1, "one"),
        ("bad", "[When.DEEP]", "GPU", "problem", 1, "one[manual]@zero it is bad"),
        ("good", "[When.BOOT]", "GPU", "ok", 0, ""),
    ],
)
def test_a_pod_that_begins_where_it_is_asked_for_checks_deeply_and_keeps_the_word(
    world: World, fact: str, when: str, hardware: str, state: str, ran: int, said: str
) -> None:
    add(world, "one", class_="MANUAL", when=when)
    check = world.tree / "health.d/one.py"
    check.write_text(check.read_text().replace("period_s", f"hardware=Hardware.{hardware}, period_s"))
    (world.root / "fact").write_text(f"{fact}\n")
    file = world.root / "health/deep/said.json"
    # It hears from the controller a little later.
    env = {**world.environment, "MINIVM_HEALTH_ROUND_SECONDS": "0.2", "MINIVM_EXPECT_GPUS": "1"}
    with served(world, {}, {"deep": None}, {"deep": True}) as asked:
        process = subprocess.Popen([sys.executable, "-I", "-m", "health.checks.loop"], env=env)
        try:
            until(lambda: file.exists() and json.loads(file.read_text())["state"] == state, "it has checked")
        finally:
            process.kill()
            process.wait()
    word = json.loads(file.read_text())
    assert word == {"boot_id": boot_id(), "state": state, "ran": ran, "said": said}
    assert asked[:3] == [{"ask": "deep"}] * 3


def test_a_pod_that_is_not_asked_checks_nothing_deeply_and_a_person_who_asks_is_answered(world: World) -> None:
    add(world, "one", when="[When.DEEP]")
    file = world.root / "health/deep/said.json"
    with served(world, {"deep": False}):
        process = subprocess.Popen([sys.executable, "-I", "-m", "health.checks.loop"], env=world.environment)
        try:
            until(file.exists, "it knows")
        finally:
            process.kill()
            process.wait()
    assert json.loads(file.read_text())["state"] == "not asked"
    assert not (world.root / "verdicts/one.json").exists()
    health(world, "--checks", "one")
    assert json.loads(file.read_text())["state"] == "not asked", "one of them is not all"
    health(world, "--when", "deep")
    assert json.loads(file.read_text())["state"] == "ok"


SAYS_WHO = "open({place!r}, 'w').write(str(__import__('os').getppid()) + open('/proc/self/cmdline').read())\n"
DEAF = "__import__('signal').pthread_sigmask(0, range(1, 65)); __import__('time').sleep(600)\n"


def test_a_round_of_the_loop_starts_no_interpreter_and_ends_in_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(world, "one", when="[When.BACKGROUND]")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    place, check = world.root / "who", world.tree / "health.d/one.py"
    text = check.read_text()
    world.script("health.d/one.py", text + SAYS_WHO.format(place=str(place)), 0o644)
    assert health_loop.round_once("background", 60.0, only_due=False) == ""
    assert place.read_text() == f"{os.getpid()}{Path('/proc/self/cmdline').read_text()}"
    assert world.verdict("one")["result"] == "ok"
    world.script("health.d/one.py", text + DEAF, 0o644)
    assert "did not end within 0.5 s" in health_loop.round_once("background", 0.5, only_due=False)


def test_the_loop_starts_no_round_while_nothing_is_due(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add(world, "one", period=3600, when="[When.BACKGROUND]")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    assert health_loop.is_round_due(time.time()), "no round has been"
    health(world, "--when", "background")
    assert not health_loop.is_round_due(time.time())
    assert health_loop.is_round_due(time.time() + 3300)
    (world.root / "verdicts/one.json").unlink()
    assert health_loop.is_round_due(time.time())


def test_the_broker_serves_its_socket_without_a_controller(world: World) -> None:
    (world.root / "verdicts").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(world.root / "notify"))
        notify.settimeout(PATIENCE)
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "health.broker"],
            env={**world.environment, "NOTIFY_SOCKET": str(world.root / "notify"), "MINIVM_CONTROLLER": "127.0.0.1:9"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert notify.recv(100) == b"READY=1"
            path = Path(world.environment["MINIVM_BROKER"])
            assert path.stat().st_mode & 0o777 == 0o600
            world.script("prolog.d/10-look", '#!/bin/sh\nexit "$MINIVM_UNFIT"\n')
            assert world.run("prolog")[0] == 0
            assert world.records()[-1]["checks"]["broker"] == {"prolog.10-look": "seen, not long enough"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            assert not path.exists()
        finally:
            process.kill()
            process.wait()


# The command line.


def test_the_table_shows_what_is_wrong_and_what_to_do(world: World) -> None:
    add(world, "one")
    add(world, "two")
    (world.root / "fact").write_text("bad\n")
    code, out, _ = cli(world, "health", "--run", "--when", "prolog")
    assert code == 2
    assert "one" in out
    assert "PROBLEM node" in out
    assert "it is bad" in out
    assert "recovers by itself" in out
    (world.root / "fact").write_text("good\n")
    assert cli(world, "health", "--run", "one", "two")[0] == 0
    assert cli(world, "health", "--nhc")[1] == "nhc: Health check passed\n"


def test_exit_codes_tell_ok_user_problem_and_unknown_apart(world: World) -> None:
    add(world, "one", class_="USER")
    assert cli(world, "health")[0] == 3, "nothing is known"
    assert cli(world, "health", "--run", "one")[0] == 0
    (world.root / "fact").write_text("bad\n")
    assert cli(world, "health", "--run", "one")[0] == 1
    (world.root / "fact").unlink()
    assert cli(world, "health", "--run", "one")[0] == 3


def test_other_tools_get_their_own_words(world: World) -> None:
    add(world, "one", class_="REBOOT")
    (world.root / "fact").write_text("bad\n")
    cli(world, "health", "--run", "one")
    assert cli(world, "health", "--nhc")[:2] == (1, "ERROR: nhc: Health check failed:  one: it is bad\n")
    assert cli(world, "health", "--npd")[:2] == (1, "one: it is bad\n")
    assert [item["check"] for item in json.loads(cli(world, "health", "--json")[1])] == ["one"]
    assert cli(world, "health", "--class", "rma")[0] == 0
    assert cli(world, "health", "--class", "reboot")[0] == 2


def test_an_unknown_check_is_told_with_the_nearest_name(world: World) -> None:
    add(world, "gpu_ecc")
    cli(world, "health", "--run", "gpu_ecc")
    code, _, err = cli(world, "health", "gpu_eccc")
    assert code == 3
    assert "did you mean 'gpu_ecc'?" in err


def test_an_expired_verdict_is_shown_as_unknown(world: World) -> None:
    add(world, "one")
    cli(world, "health", "--run", "one")
    path = world.root / "verdicts/one.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": time.time() - 1}))
    code, out, _ = cli(world, "health")
    assert code == 3
    assert "out of date; it was ok: fine" in out


def test_clear_forgets_a_held_xid_and_keeps_the_cursor(world: World) -> None:
    folder = world.root / "health/memory"
    folder.mkdir(parents=True)
    (folder / "xid.json").write_text(json.dumps({"boot_id": boot_id(), "state": {"cursor": 7.0, "held": {"x": {}}}}))
    assert cli(world, "clear", "xid")[0] == 0
    assert json.loads((folder / "xid.json").read_text())["state"] == {"cursor": 7.0}


def test_a_drill_judges_a_recording_as_though_it_were_this_node(world: World) -> None:
    shutil.rmtree(world.tree)
    shutil.copytree(ROOT / "scripts", world.tree)
    sick = ROOT / "tests/recordings/nvidia-smi/a100-remap-failed"
    assert cli(world, "health", "gpu_row_remap", "--recording", str(sick))[0] == 2
    verdict = world.verdict("gpu_row_remap")
    assert (verdict["result"], verdict["class"]) == ("problem", "rma")
    assert verdict["subject"].startswith("GPU-")


def test_the_selftest_command_refuses_a_bad_tree_with_reasons(world: World) -> None:
    world.script("health.d/typo.py", "def x(:\n")
    code, _, err = cli(world, "selftest", str(world.tree))
    assert code == 1
    assert "typo.py: SyntaxError" in err
    assert cli(world, "selftest", str(ROOT / "scripts"))[0] == 0
