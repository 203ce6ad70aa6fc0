"""The look at the node after jobs: once for all that have ended, and not while a node waits to be free."""

from __future__ import annotations

import os
import time

from gitsync import lease
from health.ask import ask_broker
from health.places import Places
from health.runner import gate, record
from health.script import UNFIT, environment

# After the first of them, so that it serves those that end with it; and from one look to the next.
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
        """Whether a job has ended of which no look that is over knows."""
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
        """It could not begin, or was cut, or failed, and is owed still. Whether that is new."""
        first, self._put_off, self._owed_at = not self._put_off, True, now + APART_S
        return first

    def ended(self, pid: int, status: int, now: float) -> bool:
        """Whether it was cut or failed, and that is new."""
        if pid != self._pid:
            return False
        self._pid = 0
        if status:  # ended for want of memory, say, or it failed: nobody has looked
            return self.put_off(now)
        self._put_off = False
        return False

    def work(self) -> None:
        """In a fork. A failed check drains by the broker, as one of an epilog's did."""
        with lease.hold() as held:
            if not (held.path / "health.d").is_dir():
                return
            began = time.monotonic()
            env = environment("epilog", os.environ, held.commit, str(held.path), UNFIT)
            found = gate.check("epilog", held.path, held.commit, env, BUDGET_S, self._places)
            if any(map(gate.stops_a_job, found.problems)):
                ask_broker({"ask": "look"}, 0.5)
            checks: dict[str, object] = {"fresh": found.fresh, "ran": found.ran}
            if found.problems:
                checks["problems"] = {verdict.check: verdict.reason for verdict in found.problems}
            entry: dict[str, object] = {
                "at": round(time.time(), 3),
                "kind": "after",
                "job": "",
                "commit": held.commit,
                "result": "broken" if found.fault else "ok",
                "seconds": round(time.monotonic() - began, 4),
                "scripts": [],
                "checks": checks,
            }
            if found.fault:
                entry["broken"] = [f"health.d: {found.fault}"]
            record.append(entry)
