"""The broker enters incidents while a person forgives some: two processes, one file, and neither loses the other's."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from health.ledger import LOCK, Ledger
from tests.waiting import until

GPU = "GPU-aa"
ENTER = """
import sys
from pathlib import Path
from health.ledger import Ledger
for number in range(int(sys.argv[2])):
    Ledger(Path(sys.argv[1])).enter("GPU-aa", {"at": 1.0, "check": "xid", "reason": sys.argv[3]}, 0.0, 3)
"""
FORGIVE = """
import sys, time
from pathlib import Path
from health.ledger import Ledger
for number in range(int(sys.argv[2])):
    Ledger(Path(sys.argv[1])).forgive("GPU-aa", time.time())
"""


def start(code: str, ledger: Path, times: int, name: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, str(ledger), str(times), name])


def book(ledger: Path) -> dict[str, object]:
    return dict(json.loads((ledger / f"{GPU}.json").read_text()))


def waits_for_a_lock(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    def waits() -> bool:
        assert process.poll() is None, "it did not wait for the lock"
        return f"-> FLOCK  ADVISORY  WRITE {process.pid} " in Path("/proc/locks").read_text()

    return waits


def test_no_incident_and_no_forgiveness_is_lost_between_two_writers(tmp_path: Path) -> None:
    Ledger(tmp_path).enter(GPU, {"at": 1.0, "check": "xid", "reason": "first"}, 0.0, 3)
    writers = [start(ENTER, tmp_path, 30, f"writer {number}") for number in range(3)]
    writers.append(start(FORGIVE, tmp_path, 30))
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    after = book(tmp_path)
    events = after["events"]
    assert isinstance(events, list) and len(events) == 91, "every incident is there"
    assert after.get("forgiven_at"), "and what was forgiven stays forgiven"
    assert after["offender"] is False
    assert not [path.name for path in tmp_path.iterdir() if path.name not in {f"{GPU}.json", LOCK}]


def test_whoever_changes_the_ledger_waits_for_the_one_who_does(tmp_path: Path) -> None:
    Ledger(tmp_path).enter(GPU, {"at": 1.0, "check": "xid", "reason": "first"}, 0.0, 3)
    before = book(tmp_path)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for code in (ENTER, FORGIVE):
            waiting = start(code, tmp_path, 1)
            until(waits_for_a_lock(waiting), "it waits for the lock")
            assert book(tmp_path) == before
            waiting.kill()
            waiting.wait()
