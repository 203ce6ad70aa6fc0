"""HTTP client of the ring's board, which the mirror serves under /ring."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from gitsync.rings.signing import read_secret, signature
from gitsync.schedule import RingView
from ground.errors import one_line

TIMEOUT = 5.0
LARGEST = 64 << 10
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
            return parse(reply.read(LARGEST))
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
