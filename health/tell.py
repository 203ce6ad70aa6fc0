"""What a round found, told to the pod: one sentence among its degraded reasons, and numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ground.files import write_whole
from ground.metrics import family
from health.scripts import is_of_script
from health.verdict import Class, Result, Verdict
from init.errors import InitError
from init.pod.client import Client

SENTENCE = 400


def sentence(verdicts: Mapping[str, Verdict], now: float) -> str:
    """The problems, the heaviest first; empty where there is none. What has expired is not known any more."""
    problems = [verdict for verdict in verdicts.values() if verdict.result is Result.PROBLEM and now < verdict.expires]
    problems.sort(key=lambda verdict: (-verdict.class_.weight, verdict.check))
    return "; ".join(map(_problem, problems))[:SENTENCE]


def _problem(verdict: Verdict) -> str:
    """A check takes its word back itself; a script does not run on a drained node, so the way out is named."""
    text = f"{verdict.check} ({verdict.class_}): {verdict.reason}"
    if is_of_script(verdict.check):
        text += f" (until the script is changed or removed, or: minivm health forget {verdict.check})"
    return text


def tell(text: str, name: str = "health") -> bool:
    """A condition of the pod that does not block it; an empty text takes it back. False where no init listens."""
    try:
        with Client(within=2.0) as client:
            client.request("condition", name=name, text=text, blocking=False)
    except (InitError, OSError, ValueError, EOFError):
        return False
    return True


def metrics(verdicts: Mapping[str, Verdict], now: float) -> str:
    """Text for a node exporter's textfile collector. A check's verdict is a number: 0 ok, 1 problem, 2 unknown."""
    number = {Result.OK: 0, Result.PROBLEM: 1, Result.UNKNOWN: 2}
    judged = [verdict for _, verdict in sorted(verdicts.items()) if verdict.applies]
    said = [
        ({"check": one.check, "class": str(one.class_)}, str(number[one.result] if now < one.expires else 2))
        for one in judged
    ]
    ran = [({"check": one.check}, f"{one.at:.3f}") for one in judged]
    drains = [one for one in judged if one.result is Result.PROBLEM and one.class_ is not Class.USER]
    lines = [
        *family("minivm_health_verdict", "What a check says: 0 ok, 1 problem, 2 unknown or out of date.", said),
        *family("minivm_health_verdict_at_seconds", "When a check last ran.", ran),
        *family("minivm_health_problems", "Problems of the node, those of users left out.", [({}, str(len(drains)))]),
    ]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, text: str) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError:
        return False
    return True
