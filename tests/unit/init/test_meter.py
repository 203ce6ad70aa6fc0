"""Rate limit of user log lines: one flooding user, many flooding users, and no effect on others."""

from __future__ import annotations

from init.pid1.syslog import BURST, BURST_OF_ALL, MOST_USERS, NAMED, RATE, RATE_OF_ALL, Meter


def admitted(meter: Meter, uids: list[int], seconds: int, size: int = 1000) -> int:
    """Return the admitted bytes when each uid logs a thousand lines a second."""
    found = 0
    for moment in range(seconds * 1000):
        for uid in uids:
            found += size if meter.admits(uid, size, moment / 1000) else 0
    return found


def test_one_user_gets_so_much_and_the_next_one_too() -> None:
    meter = Meter(0.0)
    assert admitted(meter, [1000], 30) <= BURST + 30 * RATE
    assert meter.admits(1001, 1000, 30.0)
    (text,) = meter.summary()
    assert text.startswith(f"dropped {meter.refused:,} lines ({meter.refused * 1000:,} bytes) of uid 1000: ")
    assert meter.summary() == [], "told once"


def test_many_users_together_get_so_much_and_need_no_more_memory() -> None:
    """Many users together have one limit and bounded memory, because one user may have thousands of uids."""
    meter = Meter(0.0)
    uids = list(range(1000, 1000 + 2 * MOST_USERS))
    assert admitted(meter, uids, 1, 10_000) <= BURST_OF_ALL + RATE_OF_ALL
    assert len(meter._users) == MOST_USERS
    told = meter.summary()
    assert len(told) <= NAMED + 1 and "of other users" in told[-1]


def test_who_is_quiet_is_heard_again() -> None:
    meter = Meter(0.0)
    while meter.admits(1000, 1000, 0.0):
        pass
    assert not meter.admits(1000, 1000, 0.001)
    assert meter.admits(1000, 1000, 1.0)


def test_an_empty_line_is_not_free() -> None:
    assert admitted_lines(Meter(0.0)) < BURST


def admitted_lines(meter: Meter) -> int:
    count = 0
    while meter.admits(1000, 0, 0.0):
        count += 1
    return count
