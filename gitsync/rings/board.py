"""The ring's board, kept by the mirror: which pods took a commit, and on which it failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gitsync.layout import is_commit
from ground.files import write_whole

# The board forgets the oldest commits beyond this number.
MAX_COMMITS = 50
MAX_REASONS = 20
# Successes and failures have separate bounds: any number of successes leaves room for a failure.
MAX_PODS = 20_000
LARGEST = 8192


@dataclass(slots=True)
class CommitReports:
    """Reports about one commit, one entry per pod. A failure outweighs the same pod's success."""

    first_seen: float
    good: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


class Board:
    """All records, in memory and in one file that is replaced atomically."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, CommitReports] = {}
        self._load()

    def _load(self) -> None:
        try:
            for commit, entry in json.loads(self._path.read_text()).items():
                self._records[commit] = CommitReports(
                    float(entry["first_seen"]), set(entry["good"]), dict(entry["failed"])
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._records = {}

    def _save(self) -> None:
        kept = {
            commit: {"first_seen": each.first_seen, "good": sorted(each.good), "failed": each.failed}
            for commit, each in self._records.items()
        }
        write_whole(self._path, json.dumps(kept))

    def _record(self, commit: str) -> CommitReports:
        if commit not in self._records:
            while len(self._records) >= MAX_COMMITS:
                del self._records[min(self._records, key=lambda each: self._records[each].first_seen)]
            self._records[commit] = CommitReports(self._clock())
            self._save()
        return self._records[commit]

    def see(self, commit: str) -> None:
        """Record that the mirror took the commit; the ring's delay for it starts now."""
        with self._lock:
            self._record(commit)

    def view(self, commit: str) -> dict[str, object] | None:
        """Return the board's view of a commit; None if the mirror never served it. Queries add no records."""
        with self._lock:
            record = self._records.get(commit)
            if record is None:
                return None
            reasons = [f"{pod}: {reason}" for pod, reason in list(record.failed.items())[:3]]
            return {
                "first_seen": record.first_seen,
                "good": len(record.good - set(record.failed)),
                "failed": len(record.failed),
                "reasons": reasons,
            }

    def report(self, body: bytes) -> bool:
        """Record a pod's report; return False if it is malformed or about a commit that the mirror never served."""
        if len(body) > LARGEST:
            return False
        try:
            data = json.loads(body)
            pod, commit, ok, reason = str(data["pod"])[:253], data["commit"], data["ok"], str(data.get("reason", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if not isinstance(commit, str) or not is_commit(commit) or not isinstance(ok, bool) or not pod:
            return False
        with self._lock:
            record = self._records.get(commit)
            if record is None:
                return False
            if ok:
                if len(record.good) < MAX_PODS:
                    record.good.add(pod)
            elif len(record.failed) < MAX_REASONS or pod in record.failed:
                record.failed[pod] = reason[:300]
                # A failure must survive a restart of the mirror: it stops the other nodes from taking the commit.
                self._save()
        return True
