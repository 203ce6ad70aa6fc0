"""The guard of a daemon's socket ends the processes that hold its connections, with their user's rights alone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from init.helpers import socket_guard
from init.helpers.socket_guard import LOOKS, SocketWatch, connections, dump, kill_holders
from tests.waiting import until

pytestmark = pytest.mark.root

BOB, ANN, GROUP, OTHER_GROUP = 20002, 20001, 20000, 20007
CONNECTIONS = 12
PYTHON = "/usr/bin/python3"  # any user may start it
HOLD = f"""
import socket, sys, time
held = [socket.socket(socket.AF_UNIX) for _ in range({CONNECTIONS})]
for stream in held: stream.connect(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""
HIDDEN = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE\n"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        Path(directory).chmod(0o755)
        path = Path(directory) / "socket"
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(100)
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for stream in accepted:
            stream.close()


@pytest.fixture
def hold(path: Path) -> Iterator[Start]:
    processes = []

    def start(user: int, group: int = GROUP, before: str = "") -> subprocess.Popen[str]:
        command = [PYTHON, "-c", before + HOLD, str(path)]
        process = subprocess.Popen(command, user=user, group=group, extra_groups=[], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout and process.stdout.readline() == "held\n"
        until(lambda: len(held(user, path)) in (CONNECTIONS, 2 * CONNECTIONS), "all connections are accepted")
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def held(user: int, path: Path) -> set[int]:
    return {inode for inode, holder in connections(dump(), str(path)).items() if holder == user}


def test_the_holders_are_ended_in_whatever_group_and_nobody_else(path: Path, hold: Start) -> None:
    bobs, anns = [hold(BOB), hold(BOB, OTHER_GROUP)], hold(ANN)
    idle = subprocess.Popen(["sleep", "600"], user=BOB, group=GROUP, extra_groups=[])
    try:
        assert len(held(BOB, path)) == 2 * CONNECTIONS
        kill_holders(BOB, held(BOB, path))
        assert [bob.wait(120) for bob in bobs] == [-9, -9]
        until(lambda: not held(BOB, path), "the connections are closed")
        assert anns.poll() is None and len(held(ANN, path)) == CONNECTIONS
        assert idle.poll() is None
    finally:
        idle.kill()
        idle.wait()


def test_a_user_ends_no_other_user_s_process_that_holds_the_same_connections(path: Path, hold: Start) -> None:
    """A descriptor can be passed on: the guard of one user's connections must not become another user's weapon."""
    ann = hold(ANN)
    kill_holders(BOB, held(ANN, path))
    assert ann.poll() is None and len(held(ANN, path)) == CONNECTIONS


def test_a_process_that_hides_its_descriptors_is_left_and_the_look_ends(path: Path, hold: Start) -> None:
    """The connections remain, and the guard restarts the daemon."""
    bob = hold(BOB, before=HIDDEN)
    kill_holders(BOB, held(BOB, path))
    assert bob.poll() is None and len(held(BOB, path)) == CONNECTIONS


def test_a_blocked_user_who_comes_back_costs_a_restart(
    path: Path, hold: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ACL stops nobody with an open descriptor of the socket's file."""
    restarted: list[str] = []

    class Control:
        def __init__(self, control: Path) -> None: ...
        def __enter__(self) -> Control:
            return self

        def __exit__(self, *error: object) -> None: ...
        def request(self, command: str, service: str, wait: bool) -> None:
            restarted.append(f"{command} {service}")

    monkeypatch.setattr(socket_guard, "Client", Control)
    monkeypatch.setattr(SocketWatch, "apply", lambda watch: True)
    watch = SocketWatch("munged", path, path)
    first = hold(BOB)
    for _ in range(LOOKS):
        watch.look()
    assert first.wait(120) == -9 and restarted == []
    second = hold(BOB)
    for _ in range(LOOKS):
        watch.look()
    assert restarted == ["restart munged"] and second.poll() is None


def test_short_requests_of_a_busy_user_kill_none_of_the_users_programs(
    path: Path, hold: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[set[int]] = []
    monkeypatch.setattr(socket_guard, "kill_holders", lambda user, inodes: killed.append(inodes))
    monkeypatch.setattr(socket_guard, "Client", lambda control: contextlib.nullcontext(Mock()))
    monkeypatch.setattr(SocketWatch, "apply", lambda watch: True)
    watch = SocketWatch("munged", path, path)
    for _ in range(LOOKS):
        program = hold(BOB)
        watch.look()
        program.kill()
        program.wait()
        until(lambda: not held(BOB, path), "its connections are closed")
    assert killed == [set()]
