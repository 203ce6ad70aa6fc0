"""End the processes of people without access, and no others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from init.people import keep
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs a process as another user")
ADA, BOB, SYSTEM = 59_813, 59_814, 64_501


@contextmanager
def running(uid: int, script: str) -> Iterator[subprocess.Popen[bytes]]:
    # A shell cannot trap a signal that it inherits as ignored: under nohup that is SIGHUP.
    command = ["env", "--default-signal=HUP", "sh", "-c", f"{script}; echo ready; while :; do sleep 0.1; done"]
    process = subprocess.Popen(command, user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE, cwd="/")
    try:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_even_a_process_that_ignores_signals_ends_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "PATIENCE", 0.3)
    with running(ADA, "trap '' TERM HUP") as hers, running(BOB, ":") as his, running(SYSTEM, ":") as epilog:
        gone = {ADA: "ada", SYSTEM: "epilog", 0: "root"}
        assert keep.end_processes(gone, lambda uid: False) == ["ada"]
        until(lambda: hers.poll() is not None, "ada's process ended")
        assert hers.returncode == -9 and his.poll() is None and epilog.poll() is None


def test_a_chain_of_forks_that_no_look_finds_ends() -> None:
    chain = "import os\nprint('ready', flush=True)\nwhile True:\n    if os.fork(): os._exit(0)\n"
    process = subprocess.Popen(["python3", "-c", chain], user=ADA, group=ADA, extra_groups=[], cwd="/",
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout and process.stdout.readline() == b"ready\n"
    keep.end_processes({ADA: "ada"}, lambda uid: False, [ADA])
    process.stdout.read()  # its end: nobody of the chain holds it any more
    process.wait()


def test_a_program_saves_its_work_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "PATIENCE", 30.0)  # a busy machine lets a shell run its trap late
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        saved = Path(directory, "saved")
        with running(ADA, f"trap 'echo text > {saved}; exit 0' HUP") as hers:
            assert keep.end_processes({ADA: "ada"}, lambda uid: False) == ["ada"]
            until(lambda: hers.poll() is not None, "it ended by itself")
            assert hers.returncode == 0 and saved.exists()


def test_a_person_whom_another_source_knows_stays() -> None:
    with running(ADA, ":") as hers:
        assert keep.end_processes({ADA: "ada"}, lambda uid: uid == ADA) == [] and hers.poll() is None
    until(lambda: keep.end_processes({ADA: "ada"}, lambda uid: False) == [], "nobody is left")
