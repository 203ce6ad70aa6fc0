"""Parser of `dcgmi diag -j`: tests by category, a result for each GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from health.api import Class, Command, Context, Finding, Unreadable, ok, problem, unknown


def diagnostic(level: int, deadline_s: float) -> Command:
    """Describe the command. It exits 226 after a failed test, and still prints its answer."""
    return Command(f"dcgmi_diag_{level}", ("dcgmi", "diag", "-r", str(level), "-j"), deadline_s=deadline_s, accept=())


@dataclass(frozen=True, slots=True)
class TestOutcome:
    test: str
    subject: str
    status: str
    detail: str


def parse(text: str) -> list[TestOutcome]:
    start = text.find("{")
    try:
        data = json.loads(text[start:]) if start >= 0 else None
    except ValueError as error:
        raise Unreadable(f"dcgmi diag: {error}") from error
    # 4.x renamed the outermost key.
    root = next(
        (data[key] for key in ("DCGM Diagnostic", "DCGM GPU Diagnostic") if isinstance(data, dict) and key in data),
        None,
    )
    if not isinstance(root, dict):
        message = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise Unreadable(f"dcgmi diag said: {message[:200]}")
    if "runtime_error" in root:
        raise Unreadable(f"dcgmi diag: {root['runtime_error']}")
    outcomes = []
    for category in _list(root, "test_categories"):
        for test in _list(category, "tests"):
            for result in [*_list(test, "results"), *([test["test_summary"]] if "test_summary" in test else [])]:
                outcomes.append(_outcome(str(test.get("name")), result))
    return outcomes


def _list(data: Any, key: str) -> list[Any]:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Unreadable(f"dcgmi diag: no list of {key}")
    return value


def _outcome(test: str, result: dict[str, Any]) -> TestOutcome:
    status = result.get("status")
    if status not in {"Pass", "Fail", "Warn", "Skip"}:
        raise Unreadable(f"dcgmi diag: {test}: status {status!r}")
    gpu = result.get("gpu_id", result.get("gpu_ids", result.get("entity_id")))
    warnings = result.get("warnings", result.get("warning", ""))
    if isinstance(warnings, list):
        warnings = "; ".join(str(item.get("warning", item) if isinstance(item, dict) else item) for item in warnings)
    return TestOutcome(
        test, "host" if gpu is None else f"gpu {gpu}", status, str(warnings or result.get("info", ""))[:200]
    )


def judge(measured: list[TestOutcome], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    ran = [outcome for outcome in measured if outcome.status != "Skip"]
    if not ran:
        raise Unreadable("dcgmi diag ran no test")
    harmless = limits.strings("warnings_that_count")
    for outcome in ran:
        name = f"DCGM {outcome.test}, {outcome.subject}"
        if outcome.status == "Fail":
            class_ = Class(limits.mapping("classes").get(outcome.test, Class.MANUAL))
            yield problem(
                f"{name}: {outcome.detail or 'failed'}", subject=outcome.subject, class_=class_, measured="Fail"
            )
        elif outcome.status == "Warn" and outcome.test in harmless:
            yield problem(f"{name}: {outcome.detail or 'warned'}", subject=outcome.subject, measured="Warn")
        elif outcome.status == "Warn":
            yield unknown(f"{name}: {outcome.detail or 'warned'}", subject=outcome.subject)
        else:
            yield ok(f"{name}: passed", subject=outcome.subject, measured="Pass", threshold="Pass")
