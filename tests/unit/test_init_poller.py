"""The poller: real descriptors, one turn at a time."""

from __future__ import annotations

import os

from init.poller import IN, Poller


def test_an_event_of_a_closed_descriptor_is_not_its_successors() -> None:
    """Two pipes are readable in one turn. Who is called first closes the other's and registers a new, silent one, that
    gets the same number: it must not be called for what came to the closed one."""
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
        os.close(other)
        read, write = os.pipe()
        assert read == other, "the number was not given away again"
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
