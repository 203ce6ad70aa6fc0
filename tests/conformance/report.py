"""Outcomes of the checks as a table and as JSON: passed, failed, not offered, not tried."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.conformance.cluster import NOT_OFFERED, NOT_TRIED

OUTCOMES = ("passed", "failed", "not offered", "not tried")
# Group -> its title in the table.
GROUPS = {
    "install": "install and readiness",
    "jobs": "submission and jobs",
    "accounting": "accounting",
    "logins": "logins",
    "security": "security",
    "metrics": "metrics and logs",
    "drain": "drain and cordon",
    "configuration": "change of configuration",
    "scale": "roll and scale",
    "upgrade": "upgrade",
    "failures": "failure of pods",
}
MOST_DETAIL = 2000


@dataclass(frozen=True, slots=True)
class Result:
    group: str
    check: str
    promise: str
    outcome: str
    detail: str
    seconds: float


@dataclass
class Report:
    """A plugin of pytest that keeps one result a check; the worst of its phases counts."""

    results: dict[str, Result] = field(default_factory=dict)
    promises: dict[str, str] = field(default_factory=dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.promises[item.nodeid] = " ".join((getattr(item, "function", Report).__doc__ or "").split())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "/conformance/" not in f"/{report.nodeid}" and not report.nodeid.startswith("test_"):
            return
        outcome, detail = judge(report)
        before = self.results.get(report.nodeid)
        if before and (before.outcome == "failed" or outcome == "passed"):
            outcome, detail = before.outcome, before.detail
        seconds = (before.seconds if before else 0.0) + report.duration
        path, _, name = report.nodeid.partition("::")
        group = Path(path).stem.removeprefix("test_")
        promise = self.promises.get(report.nodeid, "")
        self.results[report.nodeid] = Result(group, check_name(name), promise, outcome, detail, round(seconds, 1))

    def counts(self) -> dict[str, int]:
        counted = Counter(result.outcome for result in self.results.values())
        return {outcome: counted[outcome] for outcome in OUTCOMES}


def check_name(test: str) -> str:
    return test.removeprefix("test_")


def judge(report: pytest.TestReport) -> tuple[str, str]:
    """Return the outcome of one phase, and why."""
    if report.skipped:
        where = report.longrepr
        text = where[2] if isinstance(where, tuple) else str(where)
        why = text.removeprefix("Skipped: ")
        for outcome, prefix in (("not offered", NOT_OFFERED), ("not tried", NOT_TRIED)):
            if why.startswith(prefix):
                return outcome, why.removeprefix(prefix)
        return "not tried", why
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "failed", (crash.message if crash else str(report.longrepr))[:MOST_DETAIL]
    return "passed", ""


def table(results: Sequence[Result]) -> str:
    """Return one line a check by group, with the first line of why where it did not pass."""
    lines = []
    width = max((len(result.check) for result in results), default=0)
    for group in dict.fromkeys(result.group for result in results):
        lines.append(f"\n{GROUPS.get(group, group)}")
        for result in (each for each in results if each.group == group):
            # What a cluster says may hold sequences that a terminal obeys.
            first = next(iter(result.detail.splitlines()), "")[:120]
            why = "".join(character if character.isprintable() else "?" for character in first)
            lines.append(f"  {result.check:{width}}  {result.outcome:11}  {result.seconds:6.1f} s  {why}".rstrip())
    return "\n".join(lines)


def as_json(product: str, note: str, report: Report) -> str:
    checks = [asdict(result) for result in report.results.values()]
    whole = {"product": product, "note": note, "counts": report.counts(), "checks": checks}
    return json.dumps(whole, indent=2) + "\n"
