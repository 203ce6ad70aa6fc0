"""Rates that active checks measure: lines "NAME VALUE MB/s", judged by limits and by the node's own history."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from statistics import median

from health.api import Command, Context, Finding, Inputs, Unreadable, ok, problem

# Results that are kept, and those that a comparison needs.
KEPT, ENOUGH = 20, 5
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,80}) ([0-9]{1,12}(?:\.[0-9]+)?) MB/s")


def command(part: str, deadline_s: float = 30.0) -> Command:
    """Return the source that measures one part of the node."""
    program = ("/opt/minivm/bin/python3", "-I", "-m", "health.active.measure", part)
    return Command(f"{part}_rates", program, deadline_s=deadline_s)


def parse(inputs: Inputs, source: str) -> Mapping[str, float]:
    rates: dict[str, float] = {}
    for line in inputs[source].splitlines():
        match = _LINE.fullmatch(line.strip())
        if not match:
            raise Unreadable(f"{source}: wanted NAME VALUE MB/s, not {line[:80]!r}")
        rates[match.group(1)] = float(match.group(2))
    if not rates:
        raise Unreadable(f"{source}: no rate")
    return rates


def judge(what: str, rate: float, least: float, context: Context) -> Finding:
    """Judge one rate by a limit and by the median of earlier good results; remember it if it is good.

    `last_mbs` becomes the node's metric, which compares nodes with each other.
    """
    share = context.limits.default.number("history_min_percent")
    history = _history(context.previous)
    usual = median(history) if len(history) >= ENOUGH else 0.0
    wanted = max(least, usual * share / 100)
    context.state.update(rates=list(history), last_mbs=rate)
    if rate >= wanted:
        context.state["rates"] = [*history, rate][-KEPT:]
        return ok(f"{what}: {rate:.0f} MB/s", measured=f"{rate:.0f}", threshold=f"{wanted:.0f}")
    cause = f"less than {share:g} % of its usual {usual:.0f}" if wanted > least else f"less than {least:.0f}"
    return problem(f"{what}: {rate:.0f} MB/s, {cause}", measured=f"{rate:.0f}", threshold=f"{wanted:.0f}")


def _history(previous: Mapping[str, object]) -> tuple[float, ...]:
    rates = previous.get("rates", [])
    if not isinstance(rates, list):
        return ()
    return tuple(float(rate) for rate in rates if isinstance(rate, int | float) and math.isfinite(rate))[-KEPT:]


def outliers(what: str, rates: Mapping[str, float], share: float) -> Iterable[Finding]:
    """Report parts that are slower than a share of the median of all parts."""
    usual = median(rates.values())
    for name, rate in sorted(rates.items()):
        if rate < usual * share / 100:
            yield problem(
                f"{what} {name}: {rate:.0f} MB/s, less than {share:g} % of the others' {usual:.0f}",
                subject=name,
                measured=f"{rate:.0f}",
                threshold=f"{usual * share / 100:.0f}",
            )
