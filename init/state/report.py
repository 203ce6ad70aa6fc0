"""The status line and the metrics of the copies: the newest, and the newest that was proven."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ground.files import read_plain, write_whole
from ground.metrics import family
from init.records import record
from init.state import copies
from init.view.status import duration

METRICS = "/run/minivm/metrics.d/state.prom"
SUMMARY = "/run/minivm/state.json"


@record(frozen=True, slots=True)
class Summary:
    count: int
    newest: str
    made: float  # 0: there is none
    proven: float
    failed: str  # why the newest one's proof failed


def summary(directory: Path) -> Summary:
    found = list(copies.readable(directory))
    proofs = [(manifest, copies.proof_of(directory, manifest.name)) for manifest in found]
    proven = max((proof.time for _, proof in proofs if proof and proof.ok), default=0.0)
    last = proofs[0][1] if proofs else None
    failed = last.text if last is not None and not last.ok else ""
    return Summary(len(found), found[0].name if found else "", found[0].time if found else 0.0, proven, failed)


def metrics(seen: Summary) -> str:
    lines = family("minivm_state_copies", "Copies of the controller's state", [({}, str(seen.count))])
    lines += family(
        "minivm_state_copied_timestamp_seconds", "Time of the newest copy; 0: none", [({}, f"{seen.made:.0f}")]
    )
    lines += family(
        "minivm_state_proven_timestamp_seconds", "Time of the last good proof; 0: none", [({}, f"{seen.proven:.0f}")]
    )
    lines += family(
        "minivm_state_proof_failed", "1 if the newest copy's proof failed", [({}, str(int(bool(seen.failed))))]
    )
    return "\n".join(lines) + "\n"


def publish(seen: Summary) -> None:
    Path(METRICS).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(METRICS), metrics(seen))
    data = {"made": seen.made, "proven": seen.proven, "newest": seen.newest, "failed": seen.failed}
    write_whole(Path(SUMMARY), json.dumps(data))


def line(now: float, path: Path = Path(SUMMARY)) -> str:
    """Return the line of `minivm status`; "" in a pod that makes no copies. It may have been written long ago."""
    data = read_plain(path, 8192)
    if data is None or path.lstat().st_uid not in (0, os.geteuid()):
        return ""
    try:
        said = json.loads(data)
        made, proven, failed = float(said["made"]), float(said["proven"]), str(said["failed"])
    except (ValueError, TypeError, KeyError):
        return ""
    return words(now, made, proven, failed)


def words(now: float, made: float, proven: float, failed: str) -> str:
    if not made:
        return "saved state: no copy yet"
    text = f"saved state: copied {duration(max(0.0, now - made))} ago, "
    text += f"a copy proven {duration(max(0.0, now - proven))} ago" if proven else "no copy proven yet"
    return f"{text}; the newest cannot be restored: {failed}" if failed else text
