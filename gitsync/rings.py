"""Canary rings: when a node fetches, when it may take a commit, and which nodes reported which result.

Nodes send signed reports to a board, which the mirror keeps. The signature is that of git servers' webhooks, too: an
HTTP body with a shared secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gitsync.layout import is_commit
from ground.errors import counted, one_line
from ground.files import write_whole

if TYPE_CHECKING:
    from urllib.request import Request


def place(pod: str, purpose: str) -> float:
    """Map a pod's name to a fixed number in [0, 1).

    Different purposes give unrelated numbers: a canary is not always the first to fetch. Nothing is random: the same
    pod behaves the same every time, and a person can compute it.
    """
    digest = hashlib.sha256(f"{purpose}:{pod}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


# A new cluster's git server may start after its nodes.
FIRST_RETRY_S = 2.0


def next_delay(pod: str, period: float, failures: int, backoff_max: float, *, published: bool = True) -> float:
    """Return the seconds until the next cycle.

    Nodes that start together must not fetch together: the pod's name changes the period by up to 10 %. After failures
    the period doubles up to `backoff_max`, spread over half of it, so that a server that recovers meets no wave. A node
    without a published commit begins with FIRST_RETRY_S.
    """
    if failures <= 0:
        return period * (0.9 + 0.2 * place(pod, "period"))
    first = max(period, 1.0) if published else min(max(period, 1.0), FIRST_RETRY_S)
    full = min(backoff_max, first * 2.0 ** min(failures - 1, 20))
    return full * (0.5 + 0.5 * place(pod, f"backoff-{failures}"))


def first_delay(pod: str, period: float, *, published: bool) -> float:
    """Return the seconds until the first cycle: within a period with published scripts, within 2 s without."""
    return place(pod, "first") * (period if published else min(2.0, period))


@dataclass(frozen=True, slots=True)
class RingView:
    """The ring's record of a commit: when the first node saw it, and on how many nodes it is good or failed."""

    first_seen: float | None
    good: int
    failed: int
    reasons: tuple[str, ...] = ()


def is_canary(pod: str, percent: float) -> bool:
    return place(pod, "ring") * 100 < percent


def reason_to_wait(
    pod: str, percent: float, delay: float, now: float, seen_here: float, ring: RingView | None, *, ring_asked: bool
) -> str:
    """Return why this node does not take a commit now; empty if it takes it.

    While the ring does not answer, a node that is no canary waits: its last good scripts work, and taking an unknown
    commit everywhere without seeing the canaries is the failure that rings prevent.
    """
    if percent <= 0 or is_canary(pod, percent):
        return ""
    if ring_asked and ring is None:
        return "the ring does not answer, so the canaries' results are unknown"
    if ring is not None and ring.failed:
        because = f": {ring.reasons[0]}" if ring.reasons else ""
        return f"it failed on {counted(ring.failed, 'node')} of the ring{because}"
    first = seen_here if ring is None or ring.first_seen is None else min(seen_here, ring.first_seen)
    return f"after the canaries, in {first + delay - now:.0f} s" if now < first + delay else ""


def compute_signature(body: bytes, secret: bytes) -> str:
    """Compute the value of X-Hub-Signature-256 for a body."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def is_authentic(headers: Mapping[str, str], body: bytes, secret: bytes) -> bool:
    """Verify a request: GitHub and Gitea sign the body, GitLab sends the secret itself. Pure."""
    if not secret:
        return False
    given = headers.get("x-hub-signature-256", "")
    if given:
        return hmac.compare_digest(given.encode(), compute_signature(body, secret).encode())
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
    reply = _exchange(f"{url.rstrip('/')}/{commit}")
    try:
        return None if reply is None else parse(reply[1])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def send_result(url: str, pod: str, commit: str, *, ok: bool, reason: str = "", secret: Path | None = None) -> bool:
    """Send this node's result with a commit, signed if there is a secret; return whether the ring accepted it."""
    from urllib.request import Request

    body = json.dumps({"pod": pod, "commit": commit, "ok": ok, "reason": reason[:300]}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    if key := read_secret(secret):
        request.add_header("X-Hub-Signature-256", compute_signature(body, key))
    reply = _exchange(request)
    return reply is not None and reply[0] == 204


def _exchange(request: str | Request) -> tuple[int, bytes] | None:
    """Return the status and body of the ring's reply; None without one, because a bad ring must not end a cycle."""
    # Imported late: nodes without a ring do not load urllib.
    from http.client import HTTPException
    from urllib.request import ProxyHandler, build_opener

    try:
        # The ring is inside the cluster: an outbound proxy would not find it.
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT) as reply:
            return reply.status, reply.read(LARGEST_REPLY)
    except (OSError, ValueError, HTTPException):
        return None


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
        entries = {
            commit: {"first_seen": each.first_seen, "good": sorted(each.good), "failed": each.failed}
            for commit, each in self._records.items()
        }
        write_whole(self._path, json.dumps(entries))

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
