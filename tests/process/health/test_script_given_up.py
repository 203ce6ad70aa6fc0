"""A run that is given up, at whatever moment, ends at once and leaves no script behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.living import alive
from tests.waiting import until

ROUNDS = 300  # each delay once

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
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    print("before", flush=True)
    time.sleep(600)

done = run_here(work, {}, 3.0)
assert (done.code, done.out, done.err, done.broken) == (None, "", "before\\n", "did not end within 3 s"), done
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


# A round that is given up in the middle, with a program of its own.
ROUND = """
import os, signal, time
import health.script
from health.api import Command
from health.checks.collect import collect
from health.script import run_here

health.script.GRACE_S = 60.0  # a busy machine may let the fork run late

class GivenUp(BaseException):
    pass

def give_up(number, frame):
    raise GivenUp

signal.signal(signal.SIGTERM, give_up)
place = os.path.abspath("pid")

if not os.fork():
    while not (os.path.exists(place) and open(place).read().endswith("\\n")):
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    os._exit(0)
asked = [Command("slow", ("sh", "-c", f"echo $$ > {place}; exec sleep 600"), deadline_s=600.0)]
try:
    STARTS
    run_here(lambda: collect(asked) and b"", {"PATH": os.environ["PATH"]}, 60.0)
except GivenUp:
    print(open(place).read().strip())
"""
# The signal comes after the program's first steps, and before Popen has returned.
INTERRUPTED = """
    import subprocess
    execute = subprocess.Popen._execute_child
    def interrupted(*arguments):
        execute(*arguments)
        time.sleep(600)
    subprocess.Popen._execute_child = interrupted
"""


@pytest.mark.parametrize("starts", ["pass", INTERRUPTED.strip()], ids=["it runs", "it starts"])
def test_a_round_that_is_given_up_leaves_no_program_of_its_own(tmp_path: Path, starts: str) -> None:
    command = [sys.executable, "-c", ROUND.replace("STARTS", starts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    left = int(done.stdout)
    try:
        until(lambda: not alive(left), "its program is gone")
    finally:
        if alive(left):
            os.kill(left, signal.SIGKILL)


# As a check may be that takes every exception for its own, or sits in a library that lets no handler of ours run.
TAKES_ALL = """
while True:
    try:
        time.sleep(600)
    except:
        open("told", "w").close()
"""
IN_C = """
open("told", "w").close()
sum(itertools.repeat(0))
"""
KILLED = """
import itertools, os, signal, sys, time
from health.script import run_here

def work():
    with open("next", "w") as file:
        file.write(str(os.getpid()))
    os.rename("next", "pid")
    exec(sys.argv[1])

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
run_here(work, {}, float(sys.argv[2]))
"""


@pytest.mark.parametrize(("does", "deadline_s"), [(TAKES_ALL, 600.0), (IN_C, 2.0)])
def test_a_fork_whose_caller_is_killed_soon_after_it_was_told_to_stop_ends_without_it(
    tmp_path: Path, does: str, deadline_s: float
) -> None:
    """slurmd sends TERM, and KILL a moment later."""
    with subprocess.Popen([sys.executable, "-c", KILLED, does, str(deadline_s)], cwd=tmp_path) as process:
        until((tmp_path / "pid").exists, "it has forked")
        pid = int((tmp_path / "pid").read_text())
        try:
            process.terminate()
            until((tmp_path / "told").exists, "its fork is told")
            process.kill()
            process.wait(60)
            until(lambda: not alive(pid), "its fork is gone")
        finally:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


# What a check of a site may do to the process that it is loaded into.
CLOSES = """
import os, sys
from health.script import run_here

if sys.argv[1] == "ours":
    sys.stdout.close()
try:
    said = run_here(lambda: (DOES, b"x")[1], {}, 60.0).out
except Exception as error:
    # As the loop does, which goes on.
    said = error
os.write(os.open("who", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), f"{os.getpid()} {said}\\n".encode())
"""


@pytest.mark.parametrize("does", ["sys.stdout.close()", "setattr(sys, 'stdout', None)", "sys.stderr.close()"])
@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_whatever_is_done_to_the_streams_nobody_comes_back_but_who_has_forked(
    tmp_path: Path, does: str, whose: str
) -> None:
    with subprocess.Popen([sys.executable, "-c", CLOSES.replace("DOES", does), whose], cwd=tmp_path) as process:
        process.wait(60)
    assert (tmp_path / "who").read_text() == f"{process.pid} x\n"


def test_what_is_printed_in_a_fork_is_not_what_it_gives() -> None:
    code = """
import os
from health.script import run_here
done = run_here(lambda: (print("debug"), os.system("echo of a program"), b"given")[2], {}, 60.0)
assert (done.code, done.out, sorted(done.err.split("\\n"))) == (0, "given", ["", "debug", "of a program"]), done
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


LEAVES = """
from health.api import Command
from health.checks.collect import collect
from health.script import run_here

# Both at once: one that goes on with nothing more to say, and one that says nothing.
CODE = "echo $$ > NAME; END exec sleep 600"
asked = [Command(name, ("sh", "-c", CODE.replace("NAME", os.path.abspath(name)).replace("END", end)), deadline_s=600.0)
         for name, end in (("quiet", ""), ("closed", "exec > /dev/null 2>&1;"))]
done = run_here(lambda: collect(asked) and b"", {}, 3.0)
assert done.broken == "did not end within 3 s", done
assert done.err == "", done
"""


def test_a_round_that_is_cut_leaves_none_of_the_programs_that_it_asks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"import os{LEAVES}"], cwd=tmp_path, check=True, timeout=60)
    for name in ("quiet", "closed"):
        pid = int((tmp_path / name).read_text())
        until(lambda pid=pid: not alive(pid), f"{name} is ended")  # type: ignore[misc]


def is_of(stat: Path, session: int) -> bool:
    try:
        state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(found) == session and state != "Z"


# Who gives a fork up may be given up himself in the middle of that, and says it once more.
TWICE = """
import os, signal
import health.script
from tests.waiting import until

health.script.GRACE_S = 60.0

def say(name):
    with open("." + name, "w") as file:
        file.write(str(os.getpid()))
    os.rename("." + name, name)

def work():
    try:
        say("pid")
        signal.pause()
    finally:
        say("unwinds")
        until(lambda: os.path.exists("twice"), "it is told once more", within=50)
        say("cleaned")

if not os.fork():
    until(lambda: os.path.exists("pid"), "there is a fork")
    with open("pid") as file:
        pid = int(file.read())
    os.kill(pid, signal.SIGTERM)
    until(lambda: os.path.exists("unwinds"), "it ends")
    os.kill(pid, signal.SIGTERM)
    say("twice")
    os._exit(0)
health.script.run_here(work, {}, 600.0)
print(os.path.exists("cleaned"))
"""


def test_a_fork_that_is_told_to_stop_twice_still_ends_what_it_has_started(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


# A process that no signal ends for now, as one that waits for a dead server in the kernel: the first of a PID namespace
# goes when all in it have gone, and one of those is kept by who traces it and does not look.
STUCK = """
import ctypes, os, signal, sys, time
from health.script import run, run_here
from tests.waiting import until

class GivenUp(BaseException):
    pass

def give_up(number, frame):
    raise GivenUp

def work():
    if not os.fork():
        time.sleep(600)
    with open("next", "w") as file:
        file.write(os.readlink("/proc/self"))
    os.rename("next", "pid")
    time.sleep(600)

def children():
    with open("pid") as file:
        pid = file.read()
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()

def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, CLONE_NEWPID = 0x4206, 0x20000000
signal.signal(signal.SIGTERM, give_up)
main, ours = os.getpid(), os.open("/proc/self/ns/pid", os.O_RDONLY)
if not (tracer := os.fork()):
    until(lambda: os.path.exists("pid") and children(), "the fork has a child")
    if libc.ptrace(PTRACE_SEIZE, int(children()[0]), None, None):
        os._exit(1)
    if sys.argv[2] == "give up":
        os.kill(main, signal.SIGTERM)
    time.sleep(600)
if libc.unshare(CLONE_NEWPID):
    sys.exit("no namespace")
try:
    print(run_here(work, {}, float(sys.argv[1])).broken)
except GivenUp:
    print("given up")
with open("pid") as file:
    pid = int(file.read())
print("stuck" if state(pid) not in "ZX" else "gone")
libc.setns(ours, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(tracer, signal.SIGKILL)
os.waitpid(tracer, 0)
until(lambda: state(pid) == "Z", "it ends after all")
run(["/bin/true"], {}, 60.0, 80)
try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
except ChildProcessError:
    print("nothing is left")
"""


@pytest.mark.root
@pytest.mark.parametrize(("limit", "how"), [("600", "give up"), ("3", "did not end within 3 s")])
def test_who_cannot_be_ended_holds_nobody_and_is_buried_when_he_has_ended(tmp_path: Path, limit: str, how: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, limit, how], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, errors = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert said == f"{how.replace('give', 'given')}\nstuck\nnothing is left\n", errors
