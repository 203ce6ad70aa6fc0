"""The guard of the ports of Slurm's daemons: whose connections it counts, and whom it finds over the limit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from init.helpers.port_guard import (
    ALERT_S,
    ANY,
    BOXES,
    LIMITS,
    QUIET_S,
    SLURMCTLD,
    SLURMDBD,
    WATCHED_S,
    Peer,
    PortGuard,
    find_held,
    pause,
)
from init.helpers.socket_guard import LOOKS

ROOT, ANN, BOB = 0, 1001, 1002
AT, DBD = (b"0100007F", SLURMDBD), (ANY, SLURMDBD)
HEAD = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = b"%4d: 0100007F:CA12 %s:%04X %02X 00000000:00000000 00:00000000 00000000 %5d        0 %d 1 0000 20 4 30 10 -1\n"


def sockets(counts: Mapping[tuple[int, Peer], int]) -> dict[tuple[int, Peer], set[int]]:
    return {key: set(range(count)) for key, count in counts.items()}


def looks(guard: PortGuard, *counts: Mapping[tuple[int, Peer], int]) -> list[list[tuple[int, Peer]]]:
    return [guard.look(sockets(count), float(second)) for second, count in enumerate(counts)]


def test_connections_are_counted_by_user_and_by_where_they_lead() -> None:
    established, syn_sent, close_wait = 1, 2, 8
    table = HEAD + b"".join([
        ROW % (1, *AT, established, BOB, 11),
        ROW % (2, *AT, syn_sent, BOB, 12),
        ROW % (3, *AT, close_wait, BOB, 13),
        ROW % (4, AT[0], 22, established, BOB, 14),
        ROW % (5, *AT, established, ANN, 15),
        ROW % (6, b"0200007F", BOXES, established, ANN, 16),
        ROW % (7, b"0300007F", BOXES, established, ANN, 17),
        ROW % (8, b"0200007F", SLURMDBD, established, ANN, 18),
    ])  # fmt: skip
    mapped = HEAD + ROW % (1, b"0000000000000000FFFF0000" + b"0200007F", BOXES, established, ANN, 19)
    assert find_held([table, mapped]) == {
        (BOB, DBD): {11, 12},
        (ANN, DBD): {15, 18},
        (ANN, (b"0200007F", BOXES)): {16, 19},
        (ANN, (b"0300007F", BOXES)): {17},
    }
    assert find_held([HEAD, b"", b"1: nonsense"]) == {}


@pytest.mark.parametrize("many", [LIMITS[SLURMDBD].kept + 1, LIMITS[SLURMDBD].every])
def test_a_user_who_keeps_too_many_is_found_at_the_third_look_after_the_first_and_soon_after_it(many: int) -> None:
    assert LOOKS == 3
    over, few = {(BOB, DBD): many}, {(BOB, DBD): LIMITS[SLURMDBD].kept // 4 + 1}
    guard = PortGuard(frozenset())
    assert looks(guard, over) == [[]] and not guard.is_alert
    assert looks(guard, over, over, over) == [[], [], [(BOB, DBD)]] and guard.is_alert
    assert looks(guard, {}, few, few) == [[], [], [(BOB, DBD)]]
    assert guard.expire(4 + WATCHED_S) and not guard.watched
    assert looks(guard, over, few, over, over) == [[]] * 4


def test_more_than_many_clients_side_by_side_are_found_whatever_their_age() -> None:
    number = LIMITS[SLURMDBD].every + 1
    guard = PortGuard(frozenset())
    new = [{(BOB, DBD): set(range(number * look, number * (look + 1)))} for look in range(4)]
    assert [guard.look(sockets, 1.0) for sockets in new] == [[], [], [(BOB, DBD)], [(BOB, DBD)]]


def test_many_short_clients_side_by_side_are_left() -> None:
    """`xargs -P 60 sacct` has as many connections at every look, and others each time."""
    guard = PortGuard(frozenset())
    for look in range(9):
        assert not guard.look({(BOB, DBD): set(range(60 * look, 60 * (look + 1)))}, float(look))
    assert not guard.is_alert


@pytest.mark.parametrize(
    "counts",
    [
        {(BOB, DBD): LIMITS[SLURMDBD].kept},
        {(ROOT, DBD): 1000},
        # Connections to many daemons are no flood of one: `minivm job` asks each node of a job.
        {(BOB, (b"%08X" % node, BOXES)): 4 for node in range(16)},
        {(BOB, (b"0100007F", SLURMCTLD)): 300},
    ],
)
def test_ordinary_and_trusted_use_is_left(counts: Mapping[tuple[int, Peer], int]) -> None:
    assert looks(PortGuard(frozenset([ROOT])), *[counts] * 9) == [[]] * 9


def test_each_user_over_the_limit_is_found_and_no_other() -> None:
    counts = {(BOB, DBD): 50, (ANN, DBD): 2, (ANN + 5, DBD): 50}
    assert looks(PortGuard(frozenset()), *[counts] * 4)[3] == [(BOB, DBD), (ANN + 5, DBD)]


def test_a_user_who_lets_go_at_every_third_look_is_found() -> None:
    over = {(BOB, DBD): LIMITS[SLURMDBD].every + 1}
    assert looks(PortGuard(frozenset()), over, over, {}, over, over) == [[], [], [], [], [(BOB, DBD)]]
    guard = PortGuard(frozenset())
    assert looks(guard, over, {}, over, {}, {}) == [[]] * 5 and not guard.is_alert


@pytest.mark.parametrize("bounds", [QUIET_S, ALERT_S])
def test_no_user_knows_when_the_next_look_comes(bounds: tuple[float, float]) -> None:
    """A user sees in /proc when the guard ran: at a fixed time after that, nobody would hold anything."""
    shortest, longest = bounds
    pauses = {pause(is_alert=bounds == ALERT_S) for _ in range(100)}
    assert len(pauses) > 50 and shortest <= min(pauses) and max(pauses) <= longest
    assert shortest > 1  # a client of one question has gone by then
