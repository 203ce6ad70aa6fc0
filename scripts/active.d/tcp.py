"""TCP between two nodes is fast in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parsers import rates

from health.api import Check, Class, Context, Finding, Inputs, When, ok, problem

NEEDS = {"nodes": 2, "minutes": 2, "period_s": 86400}
CHECK = Check(
    name="tcp",
    about="TCP between two nodes is fast in both directions",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.ACTIVE}),
    sources=(rates.command("tcp", deadline_s=90.0),),
    thresholds="active",
)


def parse(inputs: Inputs) -> Mapping[str, float]:
    return rates.parse(inputs, "tcp_rates")


def judge(measured: Mapping[str, float], context: Context) -> Iterable[Finding]:
    least = context.limits.default.number("tcp_min_mbs")
    context.state["last_mbs"] = min(measured.values())
    for name, rate in sorted(measured.items()):
        direction, _, peer = name.partition("_")
        text = f"TCP {direction} {peer}: {rate:.0f} MB/s"
        if rate < least:
            yield problem(f"{text}, less than {least:.0f}", measured=f"{rate:.0f}", threshold=f"{least:.0f}")
        else:
            yield ok(text, measured=f"{rate:.0f}", threshold=f"{least:.0f}")
