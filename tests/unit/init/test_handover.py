"""A hand-over that hangs at either fork is found once it is overdue, and its processes end; others stay."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from init.helpers.serving import HANDOVER_S, Process, find_hanging, kill_all, look_up, wait_for_exit
from tests.waiting import until

# Replaces itself as slurmd does: it forks twice, executes itself, and waits for the word of the successor and for the
# first child.
DAEMON = """
import os, sys, time
hangs = sys.argv[1]
if "TELL" in os.environ:
    if hangs != "successor":
        os.write(int(os.environ["TELL"]), b".")
    time.sleep(1000)
read, write = os.pipe()
os.set_inheritable(write, True)
child = os.fork()
if child == 0:
    if os.fork() == 0:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "TELL": str(write)})
    if hangs == "child":
        time.sleep(1000)
    os._exit(0)
os.close(write)
os.read(read, 1)
os.waitpid(child, 0)
if hangs == "nothing":
    os._exit(0)
time.sleep(1000)
"""


@contextlib.contextmanager
def daemon(hangs: str, program: str = DAEMON) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", program, hangs], start_new_session=True)
    try:
        yield started
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(started.pid)], check=False)
        started.wait()


def later() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) + HANDOVER_S + 1


def hangs_with(main: int, count: int) -> list[Process]:
    """Return the processes of the hand-over once there are so many, and the youngest is the successor."""
    hanging = find_hanging(main, later())
    with contextlib.suppress(OSError):
        if len(hanging) == count and b"TELL=" in Path(f"/proc/{hanging[-1].pid}/environ").read_bytes():
            return hanging
    return []


@pytest.mark.parametrize(("hangs", "count"), [("child", 2), ("successor", 1)])
def test_a_hand_over_that_hangs_is_found_when_it_is_overdue_and_ends(hangs: str, count: int) -> None:
    with daemon(hangs) as old:
        hanging = until(lambda: hangs_with(old.pid, count), "it hangs")
        assert old.pid not in {process.pid for process in hanging}
        assert find_hanging(old.pid, hanging[0].started + HANDOVER_S - 1) == []
        assert not wait_for_exit(old.pid, 0.0)
        kill_all(hanging)
        until(lambda: not find_hanging(old.pid, later()), "they have ended")


def test_a_hand_over_that_ended_is_none() -> None:
    with daemon("nothing") as old:
        assert old.wait(60) == 0
        assert find_hanging(old.pid, later()) == [] and wait_for_exit(old.pid, 0.0)


@pytest.mark.parametrize(
    "stranger",
    [
        "import os, sys; os.fork() or os.execv('/bin/sleep', ['sleep', '1000']); os.wait()",
        "import os, time; os.fork() or os.setsid(); time.sleep(1000)",
    ],
    ids=["a script that it runs", "a step of a job"],
)
def test_other_children_are_left_alone(stranger: str) -> None:
    with daemon("", stranger) as old:
        children = Path(f"/proc/{old.pid}/task/{old.pid}/children")
        until(children.read_text, "it has a child")
        child = int(children.read_text())
        until(lambda: b"sleep\0" in Path(f"/proc/{child}/cmdline").read_bytes() or _session(child) == child, "apart")
        assert find_hanging(old.pid, later()) == []
        subprocess.run(["kill", "-KILL", str(child)], check=True)


def _session(pid: int) -> int:
    process = look_up(pid)
    return process.session if process else 0


def test_a_number_that_is_used_again_is_not_killed() -> None:
    with daemon("successor") as old:
        (hanging,) = until(lambda: hangs_with(old.pid, 1), "it hangs")
        kill_all([Process(hanging.pid, hanging.started - 5, hanging.session, hanging.command, hanging.user)])
        assert look_up(hanging.pid) == hanging
