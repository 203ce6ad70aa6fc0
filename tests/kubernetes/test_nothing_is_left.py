"""The lab itself: what it took of this machine it gives back, however the run that had it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kubernetes import left
from tests.kubernetes.conftest import GIVEN, refusal
from tests.kubernetes.lab import STATE, UP
from tests.kubernetes.world import IMAGES
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(GIVEN or refusal()), reason=f"no lab here: {refusal() or 'KUBECONFIG is given'}")
# A run of tests, whose child holds the lab in a session of its own.
RUN = """
import subprocess, sys
held = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(held.pid, flush=True)
held.wait()
"""


@contextmanager
def a_run() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """With the number of the lab's holder."""
    hold = (sys.executable, "-m", "tests.kubernetes", "hold", "--nodes", "1", "--images", IMAGES)
    run = subprocess.Popen([sys.executable, "-c", RUN, *hold], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    try:
        yield run, int(run.stdout.readline())
    finally:
        run.kill()
        run.communicate()


def nothing_left() -> bool:
    return not left.look(STATE) and not UP.is_symlink()


def heard(run: subprocess.Popen[str], word: str) -> str:
    assert run.stdout
    return next(line for line in run.stdout if word in line)


@pytest.mark.parametrize("moment", ["network and keys", "ready /"])
def test_a_run_that_is_killed_leaves_nothing(moment: str) -> None:
    with a_run() as (run, _):
        heard(run, moment)
        there = left.look(STATE)
        assert there.namespaces and there.links and there.routes and there.files
        run.kill()
        until(nothing_left, "the holder has taken the lab down", within=240, seen=lambda: left.look(STATE))


@contextmanager
def a_lab_without_a_holder() -> Iterator[set[str]]:
    """What the kill -9 of everybody who could have taken it down leaves: its processes."""
    with a_run() as (run, holder):
        heard(run, "ready /")
        old = set(left.look(STATE).processes)
        os.kill(holder, signal.SIGKILL)
        run.wait()
        assert old & set(left.look(STATE).processes)
        yield old


def test_what_is_left_when_the_holder_itself_was_killed_goes_before_the_next_lab() -> None:
    with a_lab_without_a_holder() as old, a_run() as (run, _):
        heard(run, "ready /")
        assert not old & set(left.look(STATE).processes)
        run.kill()
        until(nothing_left, "the second lab is taken down", within=240, seen=lambda: left.look(STATE))


def test_what_is_left_when_the_holder_itself_was_killed_goes_by_kube_down() -> None:
    with a_lab_without_a_holder():
        done = subprocess.run([sys.executable, "-m", "tests.kubernetes", "down"], capture_output=True, text=True)
        assert (done.returncode, nothing_left()) == (0, True), done.stdout + done.stderr


def test_a_build_beside_the_tests_ends_with_them(tmp_path: Path) -> None:
    def builds() -> tuple[str, ...]:
        return left.started_with(str(tmp_path))

    script = "from tests.kubernetes import programs; import time; programs.beside(); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"MINIVM_KUBERNETES": str(tmp_path)})
    try:
        until(lambda: (tmp_path / "work" / "apt").is_dir() and builds(), "the build has begun", seen=builds)
    finally:
        run.kill()
        run.wait()
    until(lambda: not builds(), "the build is gone", seen=builds)
