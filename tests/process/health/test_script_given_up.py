"""A run that is given up, at whatever moment, ends at once and leaves no script behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROUNDS = 900

# One thread, as the runner is: in a second one a blocked signal would still be heard.
GIVEN_UP = """
import os, signal, sys, time
from health.script import run

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
        run(["/bin/sh", "-c", "/bin/sleep 20; : > late"], {}, 60.0, 80)
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


def test_wherever_it_is_given_up_it_ends_and_no_script_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GIVEN_UP, str(ROUNDS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "nothing is left\n"), done.stderr
