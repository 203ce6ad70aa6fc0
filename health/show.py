"""Format verdicts and incidents as tables, JSON, NHC's line and node-problem-detector's answer. Pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from health.verdict import Class, Result, Verdict

COLOURS = {Result.OK: "32", Result.PROBLEM: "31", Result.UNKNOWN: "33"}
WORDS = {Result.OK: "ok", Result.PROBLEM: "PROBLEM", Result.UNKNOWN: "unknown"}
INCIDENTS_SHOWN = 5
# Advice for each class, shown below a problem.
ACTIONS = {
    Class.USER: "inform the job's user or the script's author; the node is fine",
    Class.NODE: "recovers by itself, or by a restart of the service that it names",
    Class.REBOOT: "reset the GPU or reboot the node",
    Class.MANUAL: "inspect the machine: cable, cooling, configuration",
    Class.RMA: "replace the part",
}


def exit_code(verdicts: Sequence[Verdict], form: str = "table", *, complete: bool = True) -> int:
    """Return the exit code: Nagios' 0 1 2 3; for node-problem-detector 0 ok, 1 problem, 2 unknown; for NHC 0 or 1."""
    judged = [verdict for verdict in verdicts if verdict.applies]
    problems = [verdict for verdict in judged if verdict.result is Result.PROBLEM]
    hard = [verdict for verdict in problems if verdict.class_ is not Class.USER]
    # A complete view with nothing judged is not healthy; a filtered view without problems is.
    unknown = [verdict for verdict in judged if verdict.result is Result.UNKNOWN] or (complete and not judged)
    if form == "nhc":
        return 1 if hard else 0
    if form == "npd":
        return 1 if hard else 2 if unknown else 0
    return 2 if hard else 1 if problems else 3 if unknown else 0


def table(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    order = {Result.PROBLEM: 0, Result.UNKNOWN: 1, Result.OK: 2}
    ranked = sorted(
        verdicts,
        key=lambda item: (not item.applies, order[item.result], -item.class_.weight, item.check),
    )
    rows = [("CHECK", "VERDICT", "MEASURED", "THRESHOLD", "AGE", "REASON")]
    for item in ranked:
        word = WORDS[item.result] if item.applies else "-"
        if item.result is Result.PROBLEM:
            word += f" {item.class_}"
        rows.append(
            (
                item.check,
                word,
                item.measured or "-",
                item.threshold or "-",
                _age(now - item.at),
                item.reason,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    widths[2:4] = [min(width, 16) for width in widths[2:4]]
    lines = []
    for row, verdict in zip(rows, [None, *ranked], strict=True):
        cells = [cell[:width].ljust(width) for cell, width in zip(row[:5], widths, strict=True)]
        if colour and verdict is not None:
            code = COLOURS[verdict.result] if verdict.applies else "2"
            cells[1] = f"\x1b[{code}m{cells[1]}\x1b[0m"
        lines.append("  ".join([*cells, row[5]]).rstrip())
        if verdict is not None and verdict.result is Result.PROBLEM:
            lines.append(
                f"    {ACTIONS[verdict.class_]}" + (f"; evidence: {verdict.evidence}" if verdict.evidence else "")
            )
    counts = {result: sum(1 for item in verdicts if item.applies and item.result is result) for result in Result}
    absent = sum(1 for item in verdicts if not item.applies)
    summary = f"{counts[Result.OK]} ok, {counts[Result.PROBLEM]} problems, {counts[Result.UNKNOWN]} unknown"
    return "\n".join([*lines, summary + (f", {absent} not for this node" if absent else "")])


def as_json(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    return json.dumps([verdict.to_json() for verdict in verdicts], indent=1)


def nhc(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """Format one line as Node Health Check does, with its message for success."""
    worst = _worst(verdicts)
    if worst is None or worst.result is not Result.PROBLEM or worst.class_ is Class.USER:
        return "nhc: Health check passed"
    return f"ERROR: nhc: Health check failed:  {worst.check}: {worst.reason}"


def npd(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """Format a custom plugin's message; node-problem-detector keeps 80 characters by default."""
    worst = _worst(verdicts)
    if worst is None:
        return "no verdict"
    if worst.result is Result.OK:
        return "all checks pass"
    return f"{worst.check}: {worst.reason}"[:80]


def book_lines(book: Mapping[str, Any]) -> list[str]:
    """Format a GPU's file in the ledger: its identity and its last incidents."""
    events = book.get("events", [])
    mark = "  repeat offender" if book.get("offender") else ""
    head = f"{book.get('uuid')}  {book.get('model')}  serial {book.get('serial') or '-'}  {len(events)} incidents{mark}"
    last = events[-INCIDENTS_SHOWN:]
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(event["at"])) for event in last]
    return [head, *(f"  {day}  {event['check']}: {event['reason']}" for day, event in zip(days, last, strict=True))]


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    order = {Result.OK: 0, Result.UNKNOWN: 1, Result.PROBLEM: 2}
    judged = [verdict for verdict in verdicts if verdict.applies]
    return max(judged, key=lambda verdict: (order[verdict.result], verdict.class_.weight, verdict.check), default=None)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


FORMATS: Mapping[str, Callable[[Sequence[Verdict], float, bool], str]] = {
    "table": table,
    "json": as_json,
    "nhc": nhc,
    "npd": npd,
}
