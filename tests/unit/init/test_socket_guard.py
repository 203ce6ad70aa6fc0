"""The guard of munged's and sackd's sockets: whom it counts, whom it blocks, for how long."""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from init.helpers.socket_guard import (
    ACL,
    BLOCKED_S,
    CROWD,
    EVERY_S,
    LIMIT,
    LOOKS,
    SHARE,
    Guard,
    connections,
    dump,
    pause,
    write_acl,
)

ROOT, BOB, ANN = 0, 1002, 1001


def looks(guard: Guard, *counts: dict[int, int]) -> list[tuple[int, int] | None]:
    return [guard.look(Counter(count), float(second)) for second, count in enumerate(counts)]


def test_accepted_connections_are_counted_by_user(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(20)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(12)]
        for number, client in enumerate(clients):
            if number % 3 == 0:
                client.bind(str(tmp_path / f"client-{number}"))
            elif number % 3 == 1:
                client.bind("")  # a name of the kernel's choice
            client.connect(path)
        accepted = [listener.accept()[0] for _ in range(12)]
        assert Counter(connections(dump(), path).values()) == {os.getuid(): 12}
        assert connections(dump(), f"{path}2") == {}
        for stream in clients + accepted:
            stream.close()
    assert connections(dump(), path) == {}


def test_a_user_who_holds_many_connections_is_blocked_at_the_third_look() -> None:
    assert LOOKS == 3
    many = {BOB: LIMIT}
    assert looks(Guard(frozenset()), many, many, many) == [None, None, (BOB, LIMIT)]
    assert looks(Guard(frozenset()), many, {}, many, many) == [None] * 4
    assert looks(Guard(frozenset()), *[{BOB: LIMIT - 1}] * 9) == [None] * 9
    assert looks(Guard(frozenset([ROOT])), *[{ROOT: 1000}] * 9) == [None] * 9


def test_a_user_who_lets_go_at_every_third_look_is_blocked() -> None:
    many = {BOB: LIMIT}
    assert looks(Guard(frozenset()), many, many, {}, many, many) == [None, None, None, None, (BOB, LIMIT)]
    assert looks(Guard(frozenset()), *[many, {}] * 9) == [None] * 18


def test_no_user_knows_when_the_next_look_comes() -> None:
    """A user sees in /proc when the guard ran: at a fixed time after that, nobody would hold anything."""
    pauses = {pause() for _ in range(100)}
    assert len(pauses) > 50 and min(pauses) > 0 and max(pauses) <= 2 * EVERY_S


def test_users_who_wait_because_of_another_are_not_blocked_with_that_user() -> None:
    guard = Guard(frozenset())
    crowd = {BOB: 1000, ANN: LIMIT + 1}
    assert looks(guard, crowd, crowd, crowd, {ANN: LIMIT + 1}, {}) == [None, None, (BOB, 1000), None, None]
    assert set(guard.blocked) == {BOB}


@pytest.mark.parametrize(
    ("counts", "blocked"),
    [
        (dict.fromkeys(range(2000, 2006), LIMIT - 1), True),
        (dict.fromkeys(range(2000, 2008), SHARE), True),
        # Room is left: nobody is blocked for a few connections.
        (dict.fromkeys(range(2000, 2007), SHARE), False),
        (dict.fromkeys(range(2000, 2003), LIMIT - 1), False),
        # Many users with a few requests each, as after a login of a class.
        (dict.fromkeys(range(2000, 2020), SHARE - 1), False),
        # The daemons' own connections are no crowd.
        ({ROOT: 1000, BOB: SHARE}, False),
    ],
)
def test_several_users_who_fill_a_socket_together_are_blocked_one_after_the_other(
    counts: dict[int, int], blocked: bool
) -> None:
    assert bool(looks(Guard(frozenset([ROOT])), *[counts] * LOOKS)[-1]) is blocked


def test_a_crowd_is_reduced_until_there_is_room() -> None:
    """A blocked user's connections end with the restart of the daemon; the other users connect again."""
    guard, users = Guard(frozenset()), dict.fromkeys(range(2000, 2006), LIMIT - 1)
    for second in range(60):
        left = {user: number for user, number in users.items() if user not in guard.blocked}
        guard.look(Counter(left), float(second))
    assert len(guard.blocked) == 3 and sum(left.values()) < CROWD


def test_connections_that_outlive_the_block_restart_nothing_for_a_minute() -> None:
    guard, many = Guard(frozenset()), Counter({BOB: LIMIT})
    answers = [guard.look(many, float(second)) for second in range(200)]
    assert [second for second, answer in enumerate(answers) if answer] == [2, 64, 126, 188]


def test_a_block_ends() -> None:
    guard = Guard(frozenset())
    looks(guard, *[{BOB: LIMIT}] * 3)
    assert not guard.expire(BLOCKED_S)
    assert guard.expire(BLOCKED_S + 2)
    assert not guard.blocked and not guard.expire(BLOCKED_S + 3)


def test_the_acl_denies_users_and_leaves_the_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_acl(tmp_path, [BOB, ANN])
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert len(os.getxattr(tmp_path, ACL)) == 4 + 8 * 6
    write_acl(tmp_path, [])
    write_acl(tmp_path, [])
    assert ACL not in os.listxattr(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
