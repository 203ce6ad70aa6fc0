"""Lists of this machine's processes, made by a user who would like to be taken for the node, or for root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from health.api import Capture, Result
from health.checks.builtin import processes, waiting
from health.checks.cases import Case, judge_case
from health.checks.load import load_checks
from health.verdict import Class
from tests.waiting import until

TREE = Path(__file__).resolve().parents[3] / "scripts"
NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
# posix_spawn waits in a vfork until its child has done what it was told first: to open a pipe that nobody writes to.
VFORK = """
import os, sys
os.setuid(65534)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""


def row(listed: Capture, pid: int) -> list[str]:
    return next((line.split() for line in listed.text.splitlines() if line.startswith(f"{pid} ")), [])


def test_a_vfork_is_its_user_s_and_a_kill_ends_it(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    pipe = Path("/tmp") / f"minivm-{os.getpid()}-pipe"
    os.mkfifo(pipe)
    try:
        os.chown(pipe, NOBODY, NOBODY)
        spawner = subprocess.Popen([sys.executable, "-I", "-c", VFORK, str(pipe)], start_new_session=True)
        started.append(spawner)

        def in_its_vfork() -> list[str]:
            """While it starts it may wait for a disk, too, and as root."""
            found = row(waiting(), spawner.pid)
            return found if found[2:3] == [str(NOBODY)] and found == row(waiting(), spawner.pid) else []

        pid, start, uid, switches, killed, *_ = until(in_its_vfork, "it waits in the kernel")
        assert (uid, killed) == (str(NOBODY), "no")
        until(lambda: row(waiting(), spawner.pid)[3] == switches, "and never runs")
        captures = {"processes": processes(), "waiting": waiting()}
        old = {"d_state": {"since": {f"{pid}/{start}": [1000.0, int(switches)]}}}
        check = load_checks(TREE, ["d_state"]).checks["d_state"]
        got = judge_case(check, TREE, Case(tmp_path, captures, now=2000.0, previous=old)).verdict
        assert (got.result, got.class_) == (Result.PROBLEM, Class.USER), got.reason
        os.killpg(spawner.pid, signal.SIGKILL)
        assert spawner.wait(120) == -signal.SIGKILL, "so one that was killed and is still there hangs in truth"
    finally:
        pipe.unlink()


def test_a_process_called_like_a_step_is_no_job(started: list[subprocess.Popen[bytes]]) -> None:
    started.append(subprocess.Popen(["slurmstepd: [999.0]", "600"], executable="/bin/sleep", user=NOBODY))
    until(lambda: "slurmstepd: [999.0]" in processes().text, "it is listed")
    load_checks(TREE, ["gpu_leftovers"])
    from parsers import processes as parser  # type: ignore[import-not-found]  # of the tree, put on the path just above

    assert "999" not in parser.jobs(parser.parse(processes().text))
    step = "# processes: x\n77 1 1 S 1 0 slurmstepd: [42.0]\n# end: 1 processes"
    assert parser.jobs(parser.parse(step)) == {"42"}


def test_a_program_with_root_s_rights_is_still_its_user_s(started: list[subprocess.Popen[bytes]]) -> None:
    program = Path("/tmp") / f"minivm-{os.getpid()}-sleep"
    shutil.copy("/bin/sleep", program)
    try:
        program.chmod(0o4755)
        started.append(subprocess.Popen([str(program), "600"], user=NOBODY))
        until(lambda: str(program) in processes().text, "it is listed")
        if Path(f"/proc/{started[0].pid}").stat().st_uid != 0:
            pytest.skip("no program has root's rights here")
        assert row(processes(), started[0].pid)[5] == str(NOBODY)
    finally:
        program.unlink()
