"""The notify socket under load: real datagrams, one turn at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from init.closer import Closer
from init.notify import MOST, REFUSALS, Notify
from init.owners import Owners
from init.poller import Poller
from init.service import Service
from init.spec import parse_service
from init.states import Told


class World:
    def __init__(self, path: Path) -> None:
        self.poller, self.owners = Poller(), Owners()
        self.heard: Callable[[Told], None] = self._keep
        self.told: list[Told] = []
        self.said: list[str] = []
        self.spec: Service | None = parse_service("a", {"command": ["/x"], "ready": "notify"}, "t")
        self.notify = Notify(
            str(path), self.poller, self.owners, lambda name: self.spec if name == "a" else None,
            lambda _, told: self.heard(told), self.said.append, lambda: Closer(self.poller, self.said.append),
        )  # fmt: skip
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)
        self.sender.connect(str(path))

    def _keep(self, told: Told) -> None:
        self.told.append(told)

    def fill(self, number: int) -> int:
        """Send until the kernel's queue is full: how many went in."""
        for sent in range(number):
            try:
                self.sender.send(b"WATCHDOG=1")
            except BlockingIOError:
                return sent
        return number


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "notify.sock")
    yield world
    world.sender.close()


def test_who_sends_for_ever_does_not_keep_pid_1(made: World) -> None:
    """Each message that is followed by another one, as of a flood: a turn ends all the same, and the next one comes."""
    made.owners.add(os.getpid(), "a")
    heard: list[Told] = []

    def again(told: Told) -> None:
        heard.append(told)
        assert len(heard) <= 2 * MOST, "the flood holds PID 1"
        made.fill(1)

    made.heard = again
    made.fill(1)
    made.notify.drain()
    assert len(heard) == MOST
    made.poller.wait(Poller.now())
    assert len(heard) == 2 * MOST, "what is left wakes the next turn"


def test_refusals_are_told_a_few_times(made: World) -> None:
    sent = 0
    while sent < 5 * REFUSALS:  # of a process of no service
        sent += made.fill(5)
        made.notify.drain()
    assert len(made.said) == REFUSALS and all("it belongs to no service" in text for text in made.said)
    assert made.told == []
