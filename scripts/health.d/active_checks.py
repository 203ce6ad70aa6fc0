"""Results of the active checks that ran on this node as jobs (active.d)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, When, ok, problem, unknown

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
# The period of a record of an older release.
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class ActiveResult:
    check: str
    reason: str
    at: float
    failures: int
    period_s: float

    def is_stale(self, now: float) -> bool:
        """Tell if the result is older than the check's period, or from a clock that was ahead."""
        return not -self.period_s <= now - self.at <= self.period_s


def parse(inputs: Inputs) -> list[ActiveResult]:
    lines = inputs["active_results"].splitlines()
    if len(lines) < 2 or lines[0] != f"active results {len(lines) - 2}" or lines[-1] != "end":
        raise Unreadable("active_results: wanted a first line with the count, and a last line")
    results = []
    for line in lines[1:-1]:
        try:
            results.append(_result(json.loads(line)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise Unreadable(f"active_results: {type(error).__name__}: {error}: {line[:80]}") from error
    return results


def _result(data: Mapping[str, object]) -> ActiveResult:
    at, failures, period_s = data["at"], data["failures"], data.get("period_s", DAY)
    if not isinstance(at, int | float) or not isinstance(failures, int) or not isinstance(period_s, int | float):
        raise ValueError("wanted numbers for at, failures and period_s")
    return ActiveResult(str(data["check"])[:100], str(data["reason"])[:SHOWN], float(at), failures, float(period_s))


def judge(measured: list[ActiveResult], context: Context) -> Iterable[Finding]:
    passed = []
    for result in measured:
        hours = max(0.0, context.now - result.at) / 3600
        if result.failures >= FAILURES:
            reason = f"{result.check}: {result.reason} ({hours:.0f} h ago, failed {result.failures} times)"
            if result.is_stale(context.now):
                # A drained node is not tested: time does not repair it, and its drain ends by a person or a pass.
                yield unknown(f"{reason}; stale", subject=result.check)
            else:
                yield problem(reason, subject=result.check, measured=result.failures)
        else:
            words = ", stale" if result.is_stale(context.now) else ", failed once" if result.failures else ""
            passed.append(f"{result.check} {hours:.0f} h ago{words}")
    yield ok(f"active checks: {', '.join(passed) or 'none has run here'}")
