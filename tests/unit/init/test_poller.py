"""The poller with real descriptors, one turn at a time."""

from __future__ import annotations

import contextlib
import os
import socket

from init.pid1.serve.server import StatusServer, listen
from init.pid1.wait import IN, Poller
from tests.waiting import PATIENCE


def test_an_event_of_a_closed_descriptor_is_not_its_successors() -> None:
    """An event of a closed descriptor does not reach the next one with the same number.

    Two pipes are readable in one turn. The first callback closes the other pipe and registers a new, silent one that
    gets the same number; its callback must not run for the closed pipe's event.
    """
    poller = Poller()
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []
    made: list[int] = []

    def first(fd: int) -> None:
        if made:
            called.append(fd)
            return
        (other,) = [read for read, _ in pipes if read != fd]
        poller.remove(other)
        low, write = os.pipe()
        read = os.dup2(low, other)  # closes the other pipe and reuses its number, whichever numbers are free
        os.close(low)
        made.extend((read, write))
        poller.add(read, IN, lambda _: called.append(read))

    for read, write in pipes:
        poller.add(read, IN, lambda _, fd=read: first(fd))  # type: ignore[misc]
        os.write(write, b"x")
    poller.wait(Poller.now())
    assert made and called == []
    os.write(made[1], b"y")
    poller.wait(Poller.now())
    assert made[0] in called, "its own events reach it"


def test_an_answered_caller_leaves_nothing_behind() -> None:
    """Answered clients leave no timer and no open descriptor, however fast they connect."""
    poller = Poller()
    server = StatusServer(poller, listen("127.0.0.1:0")[0], lambda path: (200, "text/plain", "ok\n"))
    for _ in range(200):
        with socket.create_connection(server.address, timeout=PATIENCE) as caller:
            caller.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            poller.wait(Poller.now() + 1)
            assert caller.recv(4096).startswith(b"HTTP/1.1 200")
    assert len(poller._timers) == 0 and len(poller._calls) == 1
    server.close()


def test_a_caller_who_does_not_take_his_answer_is_let_go() -> None:
    """The server serves a client that reads slowly, and drops one that never reads.

    The answer exceeds the kernel's buffer: it is sent as the client reads, until the timeout.
    """
    poller = Poller()
    body = "x" * (32 << 20)
    server = StatusServer(poller, listen("127.0.0.1:0")[0], lambda path: (200, "text/plain", body))
    with socket.create_connection(server.address, timeout=PATIENCE) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
        poller.wait(Poller.now() + 1)
        assert len(poller._timers) == 1 and len(poller._calls) == 2
        caller.setblocking(False)
        seen = 0
        while len(poller._calls) == 2:
            poller.wait(Poller.now())
            with contextlib.suppress(BlockingIOError):
                seen += len(caller.recv(1 << 20))
        caller.settimeout(PATIENCE)
        while chunk := caller.recv(1 << 20):
            seen += len(chunk)
    assert seen > len(body)
    server.close()
