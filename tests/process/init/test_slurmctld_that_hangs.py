"""A slurmctld that reads its configuration anew begins another, which has its ports. Where both hang both have to go.

Programs of that name stand in its place here: whom a signal reaches is the kernel's to say, and not Slurm's.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from init.slurm.daemon import kill_others_of_its_session
from tests.waiting import until

# The one that hangs, in a session of its own: with it a second one, a script of its own, and one that has left.
SESSION = "./slurmctld 600 & echo $!; ./script 600 & echo $!; setsid ./slurmctld 600 & echo $!; exec ./slurmctld 600"


@pytest.fixture
def family(tmp_path: Path) -> Iterator[dict[str, int]]:
    for name in ("slurmctld", "script"):
        shutil.copy2("/bin/sleep", tmp_path / name)
    with ExitStack() as stack:
        main = stack.enter_context(
            subprocess.Popen(
                ["sh", "-c", SESSION], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        stack.callback(main.kill)
        assert main.stdout is not None
        names = ("second", "script", "elsewhere")
        pids = {name: int(main.stdout.readline()) for name in names} | {"main": main.pid}
        stack.callback(subprocess.run, ["kill", "-9", *map(str, pids.values())], check=False, capture_output=True)
        wanted = {"second": "slurmctld", "script": "script", "elsewhere": "slurmctld", "main": "slurmctld"}
        until(lambda: {name: program(pid) for name, pid in pids.items()} == wanted, "all of them run")
        yield pids


def program(pid: int) -> str:
    """Nothing of one that has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return "" if stat.rpartition(")")[2].split()[0] in "ZX" else stat.partition("(")[2].rpartition(")")[0]


def test_the_others_of_its_session_are_killed_and_nobody_else(family: dict[str, int]) -> None:
    """The one that hangs is PID 1's to kill, which starts it again."""
    kill_others_of_its_session(family["main"])
    until(lambda: not program(family["second"]), "the second one has ended")
    assert all(program(family[name]) for name in ("main", "script", "elsewhere"))


def test_one_that_has_ended_takes_nobody_along(family: dict[str, int]) -> None:
    kill_others_of_its_session(2**22 + 1)
    assert all(map(program, family.values()))
