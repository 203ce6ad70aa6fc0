"""The ring's memory, on the mirror: who took a commit, and on whom it failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gitsync.layout import is_commit
from ground.files import write_whole

# Old commits are forgotten; nobody asks for them.
MOST_COMMITS = 50
MOST_REASONS = 20
# Good and failed are bounded apart: however many say that all is well, a failure is heard.
MOST_PODS = 20_000
LARGEST = 8192


@dataclass(slots=True)
class Record:
    """One commit. A pod has one voice: what it said last counts, and a failure is not unsaid by an earlier success."""

    first_seen: float
    good: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


class Board:
    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._load()

    def _load(self) -> None:
        try:
            for commit, kept in json.loads(self._path.read_text()).items():
                self._records[commit] = Record(float(kept["first_seen"]), set(kept["good"]), dict(kept["failed"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._records = {}

    def _save(self) -> None:
        kept = {
            commit: {"first_seen": each.first_seen, "good": sorted(each.good), "failed": each.failed}
            for commit, each in self._records.items()
        }
        write_whole(self._path, json.dumps(kept))

    def _record(self, commit: str) -> Record:
        if commit not in self._records:
            while len(self._records) >= MOST_COMMITS:
                del self._records[min(self._records, key=lambda each: self._records[each].first_seen)]
            self._records[commit] = Record(self._clock())
            self._save()
        return self._records[commit]

    def see(self, commit: str) -> None:
        """The mirror itself took it: the fleet's clock for this commit starts."""
        with self._lock:
            self._record(commit)

    def view(self, commit: str) -> dict[str, object] | None:
        """What a pod is told; None for what was never seen here (a stranger cannot fill the board by asking)."""
        with self._lock:
            known = self._records.get(commit)
            if known is None:
                return None
            reasons = [f"{pod}: {reason}" for pod, reason in list(known.failed.items())[:3]]
            return {
                "first_seen": known.first_seen,
                "good": len(known.good - set(known.failed)),
                "failed": len(known.failed),
                "reasons": reasons,
            }

    def report(self, body: bytes) -> bool:
        """A pod's word; False where it makes no sense, or is about a commit that the mirror never served."""
        if len(body) > LARGEST:
            return False
        try:
            said = json.loads(body)
            pod, commit, ok, reason = str(said["pod"])[:253], said["commit"], said["ok"], str(said.get("reason", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if not isinstance(commit, str) or not is_commit(commit) or not isinstance(ok, bool) or not pod:
            return False
        with self._lock:
            known = self._records.get(commit)
            if known is None:
                return False
            if ok:
                if len(known.good) < MOST_PODS:
                    known.good.add(pod)
            elif len(known.failed) < MOST_REASONS or pod in known.failed:
                known.failed[pod] = reason[:300]
                # A failure must outlive a restart of the mirror: it is what holds the fleet back.
                self._save()
        return True
