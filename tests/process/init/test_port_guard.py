"""The guard of the ports of Slurm's daemons kills what holds one user's connections, however it hides them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from init.helpers import port_guard, socket_guard
from init.helpers.port_guard import LIMITS, SLURMDBD, PortWatch, find_held, read_tables
from init.helpers.socket_guard import LOOKS
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.root

BOB, ANN, GROUP = 20012, 20011, 20000
PYTHON = "/usr/bin/python3"  # any user may start it
HOLD = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection((sys.argv[1], int(sys.argv[3]))))
{then}
print("held", flush=True)
time.sleep(600)
"""
PLAIN = HOLD.format(then="")
HIDDEN = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE\n" + PLAIN
# In a message that no process has read: no process has a descriptor of it.
ON_THE_WAY = HOLD.format(then="""
ends = socket.socketpair()
for stream in held:
    socket.send_fds(ends[0], [b"x"], [stream.fileno()])
    stream.close()
""")  # fmt: skip
MANY, FEW = LIMITS[SLURMDBD].kept + 1, 2
KEPT = 1 + LOOKS  # the first look sees no connection a second time
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def address() -> Iterator[str]:
    """Stand where slurmdbd does, at an address of this test's own."""
    own = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}.9"
    with (
        socket.create_server((own, SLURMDBD), backlog=200),
        socket.create_server((own.removesuffix("9") + "10", SLURMDBD), backlog=200),
    ):
        yield own


@pytest.fixture
def other_address(address: str) -> str:
    """Another address of the same slurmdbd, as a pod has one of its own beside its Service's."""
    return address.removesuffix("9") + "10"


@pytest.fixture
def hold(address: str) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(user: int, number: int, program: str = PLAIN, to: str = address) -> subprocess.Popen[str]:
        command = [PYTHON, "-c", program, to, str(number), str(SLURMDBD)]
        process = subprocess.Popen(command, user=user, group=GROUP, extra_groups=[], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def connections(user: int) -> int:
    return sum(len(inodes) for (holder, _), inodes in find_held(read_tables()).items() if holder == user)


@pytest.mark.parametrize("program", [PLAIN, HIDDEN, ON_THE_WAY])
def test_who_holds_too_many_connections_loses_them_and_nobody_else_does(
    program: str, hold: Start, tmp_path: Path
) -> None:
    bob, ann = hold(BOB, MANY, program), hold(ANN, FEW)
    assert connections(BOB) == MANY
    watch = PortWatch(frozenset([0]), tmp_path / "no-pid-1")
    for _ in range(KEPT):
        watch.look()
    assert bob.wait(PATIENCE) == -9
    until(lambda: not connections(BOB), "the connections are closed")
    assert ann.poll() is None and connections(ANN) == FEW


def test_only_the_holders_are_killed_where_they_can_be_seen(
    hold: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may need longer to end a process; the guard would take it for one that it cannot see.
    monkeypatch.setattr(port_guard, "CLOSED_S", PATIENCE)
    monkeypatch.setattr(socket_guard, "KILL_S", int(PATIENCE))
    bob, own_work = hold(BOB, MANY), hold(BOB, 0)
    watch = PortWatch(frozenset([0]), tmp_path / "no-pid-1")
    for _ in range(KEPT):
        watch.look()
    assert bob.wait(PATIENCE) == -9 and own_work.poll() is None
    again = hold(BOB, LIMITS[SLURMDBD].kept // 4 + 1)
    watch.look()
    watch.look()
    assert again.wait(PATIENCE) == -9 and own_work.poll() is None


def test_connections_to_all_addresses_of_slurmdbd_count_together(
    hold: Start, other_address: str, tmp_path: Path
) -> None:
    half = LIMITS[SLURMDBD].kept // 2 + 1
    bob, ann = [hold(BOB, half), hold(BOB, half, to=other_address)], hold(ANN, FEW, to=other_address)
    watch = PortWatch(frozenset([0]), tmp_path / "no-pid-1")
    for _ in range(KEPT):
        watch.look()
    assert [process.wait(PATIENCE) for process in bob] == [-9, -9] and ann.poll() is None
