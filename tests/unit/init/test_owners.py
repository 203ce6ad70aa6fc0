"""Mapping of a process to its service, with the real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from init.pid1.spawn.owners import Owners


def test_a_session_outlives_its_last_known_process_by_a_hand_over_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session stays with its service for a short time after its last known process.

    The leader has exited and left a child, which may still announce the new main process. Later its number may be
    reused.
    """
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    code = "import os, sys\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdin is not None and leader.stdout is not None
    try:
        asked = Owners(time.monotonic)
        asked.add(leader.pid, "a")
        left = int(leader.stdout.readline())
        assert asked.owner(left) == "a"
        leader.wait()
        asked.remove(leader.pid)
        now += 2.0
        assert asked.owner(left) == "a"
        now += 2.0
        assert asked.owner(left) == ""
    finally:
        leader.stdin.close()
        leader.stdout.close()


def test_a_followed_process_keeps_its_session() -> None:
    asked = Owners(time.monotonic)
    session = os.getsid(0)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            asked.add(session, "a")
            asked.follow(child.pid, "a")
            asked.pids.pop(session)
            asked._session_of.pop(session)
            asked.remove(child.pid)
        finally:
            child.kill()
    assert asked._left == {session: pytest.approx(asked._left[session])}


def test_what_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = Owners(time.monotonic)
    for number in range(2000):
        asked.add(1 << 23 | number, "crash-loop")
        asked.remove(1 << 23 | number)
        now += 0.1
    assert len(asked._sessions) < 50
