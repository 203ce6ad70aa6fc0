"""A run that is given up, at whatever moment, ends at once and leaves no script behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 900

# One thread, as the runner is: in a second one a blocked signal would still be heard.
GIVEN_UP = """
import os, signal, sys, time
from health.script import run, run_here

class GivenUp(BaseException):
    pass

def give_up(number, frame):
    raise GivenUp

signal.signal(signal.SIGTERM, give_up)
for number in range(int(sys.argv[1])):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signaller = os.fork()
    if not signaller:
        time.sleep(number % 300 * 2e-5)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        STARTS
    except GivenUp:
        pass
    if os.path.exists("late"):
        sys.exit(f"round {number}: it waited for the script's own end")
    os.waitpid(signaller, 0)
    try:
        left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        continue
    sys.exit(f"round {number}: a script is left: {left}")
print("nothing is left")
"""

PROGRAM = 'run(["/bin/sh", "-c", "/bin/sleep 20; : > late"], {}, 60.0, 80)'
FORK = 'run_here(lambda: time.sleep(20) or open("late", "w").close() or b"", {}, 60.0)'
# Of who takes no signal, and has started somebody.
DEAF = """
import os, signal, sys, time
from health.script import run_here

def work():
    if not os.fork():
        time.sleep(600)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    print("before", flush=True)
    time.sleep(600)

done = run_here(work, {}, 0.5)
assert (done.code, done.out, done.broken) == (None, "before\\n", "did not end within 0.5 s"), done
done = run_here(lambda: 1 / 0, {}, 60.0)
assert done.code == 1 and "ZeroDivisionError" in done.err, done
done = run_here(lambda: os._exit(3), {}, 60.0)
assert done.broken == "exit 3", done
done = run_here(lambda: b"x" * 100_000, {}, 60.0)
assert len(done.out) == 64 * 1024, len(done.out)
"""


@pytest.mark.parametrize("starts", [PROGRAM, FORK])
def test_wherever_it_is_given_up_it_ends_and_no_script_is_left(tmp_path: Path, starts: str) -> None:
    command = [sys.executable, "-c", GIVEN_UP.replace("STARTS", starts), str(ROUNDS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "nothing is left\n"), done.stderr


def test_a_fork_that_takes_no_signal_breaks_or_floods_is_ended_as_a_script_is(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
    session = [one for one in Path("/proc").glob("[0-9]*/stat") if is_of(one, process.pid)]
    assert not session, "who was started by it is ended, too"


def is_of(stat: Path, session: int) -> bool:
    try:
        state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(found) == session and state != "Z"
