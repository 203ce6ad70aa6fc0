"""Report a round's results to the pod: a sentence among its degraded reasons, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from ground.metrics import family
from health.verdict import Class, Result, Verdict, is_of_script
from init.errors import InitError
from init.pod.client import Client

SENTENCE = 400


def sentence(verdicts: Mapping[str, Verdict], now: float) -> str:
    """List the current problems, the heaviest first; "" if there are none.

    Expired verdicts are unknown, hence skipped.
    """
    problems = [verdict for verdict in verdicts.values() if verdict.result is Result.PROBLEM and now < verdict.expires]
    problems.sort(key=lambda verdict: (-verdict.class_.weight, verdict.check))
    return "; ".join(map(_problem, problems))[:SENTENCE]


def _problem(verdict: Verdict) -> str:
    """Describe a problem. A check withdraws its verdict itself; a script does not run on a drained node, so say how."""
    text = f"{verdict.check} ({verdict.class_}): {verdict.reason}"
    if is_of_script(verdict.check):
        text += f" (until the script is changed or removed, or: minivm health forget {verdict.check})"
    return text


def tell(text: str, name: str = "health") -> bool:
    """Set a condition of the pod that does not block it; "" removes it. Returns False if no init listens."""
    try:
        with Client(within=2.0) as client:
            client.request("condition", name=name, text=text, blocking=False)
    except (InitError, OSError, ValueError, EOFError):
        return False
    return True


def metrics(verdicts: Mapping[str, Verdict], now: float) -> str:
    """Format metrics for a node exporter's textfile collector. A verdict is a number: 0 ok, 1 problem, 2 unknown."""
    number = {Result.OK: 0, Result.PROBLEM: 1, Result.UNKNOWN: 2}
    judged = [verdict for _, verdict in sorted(verdicts.items()) if verdict.applies]
    results = [
        ({"check": item.check, "class": str(item.class_)}, str(number[item.result] if now < item.expires else 2))
        for item in judged
    ]
    ran = [({"check": item.check}, f"{item.at:.3f}") for item in judged]
    drains = [item for item in judged if item.result is Result.PROBLEM and item.class_ is not Class.USER]
    lines = [
        *family("minivm_health_verdict", "A check's verdict: 0 ok, 1 problem, 2 unknown or out of date.", results),
        *family("minivm_health_verdict_at_seconds", "When a check last ran.", ran),
        *family("minivm_health_problems", "Problems of the node, without those of users.", [({}, str(len(drains)))]),
    ]
    return "\n".join(lines) + "\n"
