"""Notify socket under load: real datagrams, one turn at a time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from init.engine.states import Notified
from init.pid1.notify import MOST, REFUSALS, Notify
from init.pid1.spawn.closer import Closer
from init.pid1.spawn.owners import Owners, alive, parent, uids
from init.pid1.wait import Poller
from init.plan.service import Service
from init.plan.spec import parse_service
from tests.waiting import until


class World:
    def __init__(self, path: Path) -> None:
        self.poller, self.owners = Poller(), Owners(time.monotonic)
        self.heard: Callable[[Notified], None] = self._keep
        self.told: list[Notified] = []
        self.said: list[str] = []
        self.spec: Service | None = parse_service("a", {"command": ["/x"], "ready": "notify"}, "t")
        self.notify = Notify(
            str(path), self.poller, self.owners, lambda name: self.spec if name == "a" else None,
            lambda _, told: self.heard(told), self.said.append, lambda: Closer(self.poller, self.said.append),
        )  # fmt: skip
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)
        self.sender.connect(str(path))

    def _keep(self, told: Notified) -> None:
        self.told.append(told)

    def fill(self, number: int) -> int:
        """Send until the kernel's queue is full, and return the number of messages sent."""
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
    """A flood does not keep PID 1 in one turn.

    Every message is followed by another; the turn still ends, and the next turn continues.
    """
    made.owners.add(os.getpid(), "a")
    heard: list[Notified] = []

    def again(told: Notified) -> None:
        heard.append(told)
        assert len(heard) <= 2 * MOST, "the flood holds PID 1"
        made.fill(1)

    made.heard = again
    made.fill(1)
    made.notify.read_all()
    assert len(heard) == MOST
    made.poller.wait(Poller.now())
    assert len(heard) == 2 * MOST, "what is left wakes the next turn"


def test_refusals_are_told_a_few_times(made: World) -> None:
    sent = 0
    while sent < 5 * REFUSALS:  # sent by a process that belongs to no service
        sent += made.fill(5)
        made.notify.read_all()
    assert len(made.said) == REFUSALS and all("it belongs to no service" in text for text in made.said)
    assert made.told == []


def test_a_message_whose_sender_cannot_be_looked_at_now_is_not_lost(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is kept while its sender cannot be identified.

    When no descriptor is free to read /proc, PID 1 retries in the order sent, and judges no exit before that.
    """
    made.owners.add(os.getpid(), "a")
    refused = iter((True, True))
    owner = made.owners.owner

    def scarce(pid: int) -> str:
        if next(refused, False):
            raise OSError(24, "Too many open files")
        return owner(pid)

    monkeypatch.setattr(made.owners, "owner", scarce)
    for text in (b"STATUS=one", b"STATUS=two"):
        made.sender.send(text)
    assert made.notify.read_all() is False and made.notify.keeps
    assert made.told == []

    def both() -> bool:
        made.poller.wait(made.poller.now() + 0.01)
        return len(made.told) == 2

    until(both, "both are heard of")
    assert [told.status for told in made.told] == ["one", "two"]
    assert made.notify.read_all() is True and not made.said


def test_proc_that_cannot_be_read_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alive(os.getpid()) and os.getuid() in uids(os.getpid())
    assert not alive(2**22 + 1) and uids(2**22 + 1) == ()

    def refused(*_: object) -> int:
        raise OSError(23, "Too many open files in system")

    monkeypatch.setattr(os, "open", refused)
    for ask in (alive, uids, parent):
        with pytest.raises(OSError, match="Too many open files"):
            ask(os.getpid())
