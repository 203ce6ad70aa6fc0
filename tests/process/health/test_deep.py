"""Deep checks with real programs: each has the machine for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from health.api import Command, When
from health.checks.load import load_checks
from health.checks.loop import DEEP_S
from health.places import Places
from tests.process.living import alive
from tests.process.runner_world import World, make
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
# It says so where another one runs beside it, for which it waits a while, or for minutes where it is held.
LOADS = """#!/bin/sh
echo $$ > {root}/pid
mkdir {root}/loaded || {{ : > {root}/together; exit 0; }}
i=0
most() {{ [ -e {root}/hold ] && echo 3000 || echo 20; }}
while [ ! -e {root}/together ] && [ $i -lt $(most) ]; do sleep 0.05; i=$((i + 1)); done
rmdir {root}/loaded
"""
CHECK = """
from health.api import *
CHECK = Check(name={name!r}, about="a test's", class_=Class.MANUAL, period_s=60, when=frozenset({when}),
              sources=(Command({name!r}, ("{root}/loads", {name!r})),), thresholds="t")
def parse(inputs):
    return inputs[{name!r}]
def judge(measured, context):
    return [ok("fine")]
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make(tmp_path)
    made.script("lib/thresholds/t.json", '{"default": {}}', 0o644)
    (tmp_path / "loads").write_text(LOADS.format(root=tmp_path))
    (tmp_path / "loads").chmod(0o755)
    return made


def add(world: World, name: str, when: str) -> None:
    world.script(f"health.d/{name}.py", CHECK.format(name=name, when=when, root=world.root), 0o644)


def ran(world: World, *arguments: str) -> list[str]:
    argv = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(world.tree), "--commit", "zero"]
    done = subprocess.run(
        [*argv, *arguments], env=world.environment, capture_output=True, text=True, timeout=60, check=True
    )
    return [item["check"] for item in json.loads(done.stdout)["ran"]]


@pytest.mark.parametrize(
    ("when", "arguments", "together"),
    [
        ("[When.DEEP]", ["--when", "deep"], False),
        ("[When.DEEP]", ["--checks", "one,two"], False),
        ("[]", ["--checks", "one,two"], False),
        ("[When.DEEP, When.BOOT]", ["--when", "deep"], False),
        ("[When.DEEP, When.BOOT]", ["--when", "boot"], True),
        ("[When.PROLOG]", ["--checks", "one,two"], True),
    ],
)
def test_what_loads_the_machine_has_it_for_itself(
    world: World, when: str, arguments: list[str], together: bool
) -> None:
    """A diagnostic beside an all-reduce finds a slow GPU, and a second diagnostic is refused.

    Without exclusive use, a healthy machine would be rebooted once more and replaced.
    """
    add(world, "one", when)
    add(world, "two", when)
    if together:
        (world.root / "hold").touch()  # on a busy machine the second comes late
    assert ran(world, *arguments) == ["one", "two"]
    assert (world.root / "together").exists() is together


def person(world: World, started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-m", "health.cli", "health", "--run", "--when", "deep"]
    started.append(subprocess.Popen(argv, env=world.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    return started[-1]


def test_two_who_ask_for_deep_checks_wait_for_each_other(world: World, started: list[subprocess.Popen[bytes]]) -> None:
    """The pod has begun them, and a person does not know; or the health service was killed, and begins anew."""
    add(world, "one", "[When.DEEP]")
    (world.root / "hold").touch()
    first = person(world, started)
    until((world.root / "loaded").exists, "it has begun")
    second = person(world, started)
    assert second.stderr is not None
    assert second.stderr.readline() == b"another round of checks runs; this one waits for its end\n"
    (world.root / "hold").unlink()
    assert [process.wait(60) for process in (first, second)] == [0, 0]
    assert not (world.root / "together").exists()


def test_a_round_that_runs_brings_back_nothing_that_a_person_forgets(
    world: World, started: list[subprocess.Popen[bytes]]
) -> None:
    """Forget a check while a round runs it: the round's verdict would drain the node again for a mended fault."""
    add(world, "one", "[When.BACKGROUND]")
    places = Places(verdicts=Path(world.environment["MINIVM_VERDICTS"]))
    (world.root / "hold").touch()
    argv = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(world.tree), "--commit", "zero"]
    argv += ["--when", "background"]
    started.append(running := subprocess.Popen(argv, env=world.environment, stdout=subprocess.DEVNULL))
    until((world.root / "loaded").exists, "it reads its source")
    argv = [sys.executable, "-I", "-m", "health.cli", "forget", "one"]
    started.append(person := subprocess.Popen(argv, env=world.environment, stderr=subprocess.DEVNULL))

    def has_ended_or_waits() -> bool:
        files = map(os.path.realpath, Path(f"/proc/{person.pid}/fd").glob("*"))
        return person.poll() is not None or any(name.endswith("/round.lock") for name in files)

    until(has_ended_or_waits, "the person's command has come to the check's files")
    (world.root / "hold").unlink()
    assert running.wait(60) == 0
    person.wait(60)
    assert not places.verdict("one").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_who_ends_them_leaves_no_program_that_loads_the_machine(
    world: World, started: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    """A terminal that is lost, and he begins anew: the next ones would find what the first ones left."""
    add(world, "one", "[When.DEEP]")
    (world.root / "hold").touch()
    process = person(world, started)
    until((world.root / "loaded").exists, "it has begun")
    process.send_signal(number)
    process.wait(60)
    until(lambda: not alive(int((world.root / "pid").read_text())), "its program ends")
    assert process.returncode == 130
    assert process.stderr is not None and process.stderr.read() == b""


def test_while_deep_checks_load_the_machine_nothing_that_is_due_looks_at_it(
    world: World, started: list[subprocess.Popen[bytes]]
) -> None:
    """The memory that they take of the GPUs, and no job runs: a machine that is well would be rebooted for it."""
    add(world, "one", "[When.DEEP]")
    add(world, "two", "[When.BACKGROUND]")
    (world.root / "hold").touch()
    process = person(world, started)
    until((world.root / "loaded").exists, "it has begun")
    assert ran(world, "--when", "background", "--due") == []
    (world.root / "hold").unlink()
    assert process.wait(60) == 0
    assert ran(world, "--when", "background", "--due") == ["two"]


def test_by_no_time_at_all_nothing_that_loads_the_machine_is_meant(world: World) -> None:
    add(world, "one", "[When.DEEP]")
    add(world, "two", "[]")
    add(world, "three", "[When.BACKGROUND]")
    assert ran(world) == ["three"]


def test_one_after_the_other_the_default_ones_end_before_all_are_given_up() -> None:
    modules = load_checks(ROOT / "scripts").checks.values()
    sources = {source.name: source for module in modules if When.DEEP in module.CHECK.when
               for source in module.CHECK.sources}  # fmt: skip
    assert sum(source.deadline_s for source in sources.values() if isinstance(source, Command)) < DEEP_S - 60
