"""Verdicts and incidents for people and other tools: tables, JSON, NHC's line, node-problem-detector's answer. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from health.verdict import Class, Result, Verdict

COLOURS = {Result.OK: "32", Result.PROBLEM: "31", Result.UNKNOWN: "33"}
WORDS = {Result.OK: "ok", Result.PROBLEM: "PROBLEM", Result.UNKNOWN: "unknown"}
INCIDENTS_SHOWN = 5
# What a person does about each class, in the table's last line.
ACTIONS = {
    Class.USER: "tell the job's user, or the script's author; the node is fine",
    Class.NODE: "it should mend by itself, or by a restart of the service it names",
    Class.REBOOT: "reset the GPU or reboot the node",
    Class.MANUAL: "somebody must look at the machine: cable, cooling, configuration",
    Class.RMA: "the part must be replaced",
}


def exit_code(verdicts: Sequence[Verdict], form: str = "table", *, complete: bool = True) -> int:
    """Nagios' 0 1 2 3. For node-problem-detector 0 ok, 1 problem, 2 unknown. NHC: 0 or 1."""
    judged = [verdict for verdict in verdicts if verdict.applies]
    problems = [verdict for verdict in judged if verdict.result is Result.PROBLEM]
    hard = [verdict for verdict in problems if verdict.class_ is not Class.USER]
    # Nothing judged at all is not a healthy node; a filtered view of no problems is.
    unknown = [verdict for verdict in judged if verdict.result is Result.UNKNOWN] or (complete and not judged)
    if form == "nhc":
        return 1 if hard else 0
    if form == "npd":
        return 1 if hard else 2 if unknown else 0
    return 2 if hard else 1 if problems else 3 if unknown else 0


def table(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    order = {Result.PROBLEM: 0, Result.UNKNOWN: 1, Result.OK: 2}
    ranked = sorted(verdicts, key=lambda one: (not one.applies, order[one.result], -one.class_.weight, one.check))
    rows = [("CHECK", "VERDICT", "MEASURED", "THRESHOLD", "AGE", "REASON")]
    for one in ranked:
        word = WORDS[one.result] if one.applies else "-"
        if one.result is Result.PROBLEM:
            word += f" {one.class_}"
        rows.append((one.check, word, one.measured or "-", one.threshold or "-", _age(now - one.at), one.reason))
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
    counts = {result: sum(1 for one in verdicts if one.applies and one.result is result) for result in Result}
    absent = sum(1 for one in verdicts if not one.applies)
    said = f"{counts[Result.OK]} ok, {counts[Result.PROBLEM]} problems, {counts[Result.UNKNOWN]} unknown"
    return "\n".join([*lines, said + (f", {absent} not for this node" if absent else "")])


def as_json(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    return json.dumps([verdict.to_json() for verdict in verdicts], indent=1)


def nhc(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """One line, as Node Health Check writes it; empty words where all is well, like NHC itself."""
    worst = _worst(verdicts)
    if worst is None or worst.result is not Result.PROBLEM or worst.class_ is Class.USER:
        return "nhc: Health check passed"
    return f"ERROR: nhc: Health check failed:  {worst.check}: {worst.reason}"


def npd(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """A custom plugin's message: at most 80 characters are kept by its default."""
    worst = _worst(verdicts)
    if worst is None:
        return "no verdict"
    if worst.result is Result.OK:
        return "all checks pass"
    return f"{worst.check}: {worst.reason}"[:80]


def book_lines(book: Mapping[str, Any]) -> list[str]:
    """A GPU's book in the ledger: who it is, and its last incidents."""
    events = book.get("events", [])
    mark = "  repeat offender" if book.get("offender") else ""
    head = f"{book.get('uuid')}  {book.get('model')}  serial {book.get('serial') or '-'}  {len(events)} incidents{mark}"
    last = events[-INCIDENTS_SHOWN:]
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(event["at"])) for event in last]
    return [head, *(f"  {day}  {event['check']}: {event['reason']}" for day, event in zip(days, last, strict=True))]


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    order = {Result.OK: 0, Result.UNKNOWN: 1, Result.PROBLEM: 2}
    judged = [one for one in verdicts if one.applies]
    return max(judged, key=lambda one: (order[one.result], one.class_.weight, one.check), default=None)


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
