"""Canary rings: nodes' signed reports about a commit, and the board that collects them.

The signature is that of git servers' webhooks, too: an HTTP body with a shared secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from gitsync.layout import is_commit
from gitsync.schedule import RingView
from ground.errors import one_line
from ground.files import write_whole


def signature(body: bytes, secret: bytes) -> str:
    """Compute the value of X-Hub-Signature-256 for a body."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def authentic(headers: Mapping[str, str], body: bytes, secret: bytes) -> bool:
    """Verify a request: GitHub and Gitea sign the body, GitLab sends the secret itself. Pure."""
    if not secret:
        return False
    given = headers.get("x-hub-signature-256", "")
    if given:
        return hmac.compare_digest(given.encode(), signature(body, secret).encode())
    token = headers.get("x-gitlab-token", "")
    return bool(token) and hmac.compare_digest(token.encode(), secret)


def read_secret(path: Path | None) -> bytes:
    """Read the secret; empty without one. Called at each use, so that a rotated secret takes effect at once."""
    try:
        return path.read_bytes().strip() if path else b""
    except OSError:
        return b""


# HTTP client of the ring's board, which the mirror serves under /ring.


TIMEOUT = 5.0
LARGEST_REPLY = 64 << 10
# Errors of a server that disconnects or speaks no HTTP: a bad ring must not end a cycle.
UNUSABLE = (OSError, ValueError, HTTPException)


def parse(text: bytes) -> RingView:
    data = json.loads(text)
    first = data.get("first_seen")
    reasons = data.get("reasons", [])
    return RingView(
        first_seen=None if first is None else float(first),
        good=int(data["good"]),
        failed=int(data["failed"]),
        # Any pod can send these texts, and `gitsync status` shows them.
        reasons=tuple(one_line(str(reason)[:300]) for reason in reasons[:3]),
    )


def ask(url: str, commit: str) -> RingView | None:
    """Ask the ring about a commit; None without a usable reply."""
    try:
        with _opener().open(f"{url.rstrip('/')}/{commit}", timeout=TIMEOUT) as reply:
            return parse(reply.read(LARGEST_REPLY))
    except (*UNUSABLE, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def send_result(url: str, pod: str, commit: str, *, ok: bool, reason: str = "", secret: Path | None = None) -> bool:
    """Send this node's result with a commit, signed if there is a secret; return whether the ring accepted it."""
    body = json.dumps({"pod": pod, "commit": commit, "ok": ok, "reason": reason[:300]}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    if key := read_secret(secret):
        request.add_header("X-Hub-Signature-256", signature(body, key))
    try:
        with _opener().open(request, timeout=TIMEOUT) as reply:
            return bool(reply.status == 204)
    except UNUSABLE:
        return False


def _opener() -> urllib.request.OpenerDirector:
    # The ring is inside the cluster: an outbound proxy would not find it.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def forward_reports(url: str | None, pod: str, reports: Path, secret: Path | None) -> int:
    """Forward the runner's reports about broken scripts to the ring, remove those accepted, return how many."""
    sent = 0
    for path in sorted(reports.glob("*.json"))[:100]:
        try:
            record = json.loads(path.read_text())
            commit, reason = str(record["commit"]), f"{record['script']}: {record['reason']}"
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if url is None or send_result(url, pod, commit, ok=False, reason=reason, secret=secret):
            path.unlink(missing_ok=True)
            sent += 1
    return sent


# The ring's board, kept by the mirror: which pods took a commit, and on which it failed.


# The board forgets the oldest commits beyond this number.
MAX_COMMITS = 50
MAX_REASONS = 20
# Successes and failures have separate bounds: any number of successes leaves room for a failure.
MAX_PODS = 20_000
LARGEST_BOARD = 8192


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
        if len(body) > LARGEST_BOARD:
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
