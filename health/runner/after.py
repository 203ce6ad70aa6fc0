"""Check the node after jobs: once for all jobs that ended, while no node waits for the result."""

from __future__ import annotations

import os
import time

from gitsync import lease
from health.ask import ask_broker
from health.places import Places
from health.runner import gate, record
from health.script import UNFIT, environment

# Delay after the first job's end, so that one check serves the jobs that end with it; and between two checks.
WAIT_S = 1.0
APART_S = 10.0
BUDGET_S = 45.0


class After:
    def __init__(self, places: Places) -> None:
        self._places = places
        self._owed_at: float | None = None
        self._pid = 0
        self._last = float("-inf")
        self._put_off = False

    @property
    def is_owed(self) -> bool:
        """True while a job has ended that no finished check covers."""
        return self._owed_at is not None or self._pid != 0

    def owe(self, now: float) -> None:
        if self._owed_at is None:
            self._owed_at = max(now + WAIT_S, self._last + APART_S)

    def times(self) -> list[float]:
        return [self._owed_at] if self._owed_at is not None and not self._pid else []

    def is_due(self, now: float) -> bool:
        return self._owed_at is not None and not self._pid and now >= self._owed_at

    def began(self, pid: int, now: float) -> None:
        self._pid, self._owed_at, self._last = pid, None, now

    def put_off(self, now: float) -> bool:
        """Retry a check later that could not begin, was cut or failed; tell if this is the first failure."""
        first, self._put_off, self._owed_at = not self._put_off, True, now + APART_S
        return first

    def ended(self, pid: int, status: int, now: float) -> bool:
        """Record a child's end; tell if the check was cut or failed for the first time."""
        if pid != self._pid:
            return False
        self._pid = 0
        if status:  # killed for lack of memory, or failed: the node was not checked
            return self.put_off(now)
        self._put_off = False
        return False

    def work(self) -> None:
        """Run the epilog's checks, in a fork. A failed check drains the node through the broker, as in an epilog."""
        with lease.hold() as held:
            if not (held.path / "health.d").is_dir():
                return
            began = time.monotonic()
            env = environment("epilog", os.environ, held.commit, str(held.path), UNFIT)
            checked = gate.check("epilog", held.path, held.commit, env, BUDGET_S, self._places)
            ask_broker({"ask": "look" if any(map(gate.stops_a_job, checked.problems)) else "ended"}, 0.5)
            checks: dict[str, object] = {"fresh": checked.fresh, "ran": checked.ran}
            if checked.problems:
                checks["problems"] = {verdict.check: verdict.reason for verdict in checked.problems}
            entry: dict[str, object] = {
                "at": round(time.time(), 3),
                "kind": "after",
                "job": "",
                "commit": held.commit,
                "result": "broken" if checked.fault else "ok",
                "seconds": round(time.monotonic() - began, 4),
                "scripts": [],
                "checks": checks,
            }
            if checked.fault:
                entry["broken"] = [f"health.d: {checked.fault}"]
            record.append(entry)
