"""Log lines while no reader takes them: real pipes and sockets, one turn at a time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from init.pid1.logs import HIGH, MOST, Logs
from init.pid1.spawn.closer import Closer
from init.pid1.spawn.owners import Owners
from init.pid1.syslog import Syslog
from init.pid1.wait import Poller


class World:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.poller = Poller()
        self.logs = Logs(self.poller, self.write, as_json=False)

    def turn(self) -> None:
        self.poller.wait(Poller.now())

    def drain(self) -> bytes:
        """Read until nothing more comes."""
        os.set_blocking(self.read, False)
        found, idle = b"", 0
        while idle < 3:
            self.turn()
            try:
                found += os.read(self.read, 1 << 22)
                idle = 0
            except BlockingIOError:
                idle += 1
        return found


@pytest.fixture
def made() -> Iterator[World]:
    world = World()
    yield world
    os.close(world.read)
    os.close(world.write)


def unwritten(logs: Logs) -> int:
    return sum(map(len, logs._pending))


def test_syslog_senders_wait_while_the_output_is_stuck(made: World, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    Syslog(path, made.poller, Owners(time.monotonic), made.logs, lambda: Closer(made.poller, made.logs.log))
    text = "x" * 20_000
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(path)
        sender.setblocking(False)
        waits = 0
        while waits < 3 and sent < 2000:
            try:
                sender.send(f"<13>{sent} {text}".encode())
                sent += 1
                waits = 0
            except BlockingIOError:
                waits += 1
                made.turn()
        assert sent < 2000, "everything was taken, though nobody reads"
        assert unwritten(made.logs) < HIGH + 2 * len(text)
        out = made.drain()
        assert [line.split()[2] for line in out.splitlines()] == [str(n).encode() for n in range(sent)], "each once"
        sender.send(b"<13>after")
        assert made.drain().endswith(b"syslog | after\n"), "and it is read again"


def test_own_lines_are_dropped_and_counted_while_the_output_is_stuck(made: World) -> None:
    line = "y" * 10_000
    for number in range(1000):
        made.logs.log(f"{number} {line}")
        made.logs.flush()
    assert unwritten(made.logs) < MOST + 2 * len(line)
    told = made.drain().splitlines()
    kept = [text for text in told if line.encode() in text]
    (last,) = [text for text in told if b"were lost" in text]
    lost = sum(len(f"init | {number} {line}\n") for number in range(len(kept), 1000))
    assert last == f"init | the log's reader was too slow; {lost} bytes of init's own lines were lost".encode()
    assert made.logs.lost == 0 and made.logs.lost_ever == lost
