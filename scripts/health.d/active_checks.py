"""Results of the active checks that ran on this node as jobs (active.d)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="active_checks",
    about="the node passed its active checks, or failed none twice in a row",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(Builtin("active_results", evidence=True),),
    thresholds="",
)

# A test that fails once proves nothing.
FAILURES = 2
SHOWN = 300


@dataclass(frozen=True, slots=True)
class ActiveResult:
    check: str
    reason: str
    at: float
    failures: int


def parse(inputs: Inputs) -> list[ActiveResult]:
    lines = inputs["active_results"].splitlines()
    if len(lines) < 2 or lines[0] != f"active results {len(lines) - 2}" or lines[-1] != "end":
        raise Unreadable("active_results: wanted a first line with the count, and a last line")
    results = []
    for line in lines[1:-1]:
        try:
            results.append(_result(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Unreadable(f"active_results: {type(error).__name__}: {error}: {line[:80]}") from error
    return results


def _result(data: Mapping[str, object]) -> ActiveResult:
    at, failures = data["at"], data["failures"]
    if not isinstance(at, int | float) or not isinstance(failures, int):
        raise ValueError("wanted numbers for at and failures")
    return ActiveResult(str(data["check"])[:100], str(data["reason"])[:SHOWN], float(at), failures)


def judge(measured: list[ActiveResult], context: Context) -> Iterable[Finding]:
    passed = []
    for result in measured:
        hours = max(0.0, context.now - result.at) / 3600
        if result.failures >= FAILURES:
            reason = f"{result.check}: {result.reason} ({hours:.0f} h ago, failed {result.failures} times)"
            yield problem(reason, subject=result.check, measured=result.failures)
        else:
            passed.append(f"{result.check} {hours:.0f} h ago{', failed once' if result.failures else ''}")
    yield ok(f"active checks: {', '.join(passed) or 'none has run here'}")
