"""Every system call that PID 1 makes may fail. The matrix is `python -m bench faults`; this is a fixed part of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.fault_life import FITS, Fault, Outcome, census, live

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("strace"), reason="no strace; `make test` installs it"),
]

# What was found by the matrix, each of which ended the pod, lost a service or left a second daemon behind.
FOUND = (
    Fault("openat", "EPERM", "3", late=True),  # /proc could not be read: MAINPID was refused, and the old one ended
    Fault("close", "EIO", "5+5", late=True),  # the same, by a close that reports an error
    Fault("read", "EIO", "5+5", late=True),  # the same; and at the end, last lines that could not be read: 70
    Fault("recvmsg", "ENOMEM", "1..20", late=True),  # who took over was heard of only after the hand-over was given up
    Fault("bind", "EPERM", "3+3"),  # the HTTP port's address was taken for a wrong one: 78
    Fault("getdents64", "EIO", "1"),  # the very first import: a traceback
    Fault("newfstatat", "EIO", "7+7"),  # the same
    Fault("pipe2", "EMFILE", "3+3"),
    Fault("clone3", "EAGAIN", "1..20", late=True),
    Fault("kill", "EPERM", "1"),
)


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    live(None)  # whatever Python compiles, it has compiled now
    return census(live(None, late=True))


def lives(faults: list[Fault]) -> Iterator[Outcome]:
    # A life waits for most of its time.
    with ThreadPoolExecutor(6) as pool:
        yield from pool.map(live, faults)


def test_each_call_that_pid_1_makes_once_it_is_ready_may_fail(calls: dict[str, int]) -> None:
    """Again and again, in the first way that fits it: PID 1 stays, each service too, and what it says is so."""
    assert len(calls) > 20
    faults = [Fault(call, FITS[call][0], "3+5" if count >= 3 else "1", late=True) for call, count in calls.items()]
    found = list(lives(faults))
    assert not [f"{one.fault}: {one.failed}" for one in found if one.failed]
    assert sum(one.injected > 0 for one in found) >= len(found) - 2, "each was really refused"


def test_what_was_found_stays_mended() -> None:
    found = list(lives(list(FOUND)))
    assert not [f"{one.fault}: {one.failed}" for one in found if one.failed]
    assert all(one.injected for one in found if one.fault and one.fault.late)
