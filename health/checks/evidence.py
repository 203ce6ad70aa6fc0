"""Evidence of an incident: a capsule written at its start, with the check's sources and other possible causes."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from health.api import Builtin, Capture, Check, Result, Source
from health.checks.cases import write_case
from health.checks.collect import AT_ONCE, collect
from health.checks.hardware import expectations
from health.checks.judge import Judged
from health.checks.notes import recall
from health.places import Places
from health.script import UNFIT
from health.verdict import Verdict

# Kept with every capsule: the last job's communication.
ALWAYS: tuple[Source, ...] = (Builtin("nccl_log"),)


@dataclass(slots=True)
class Readings:
    """Source texts of this round; sources for capsules only are read once, when the first check fails."""

    places: Places
    captures: dict[str, Capture]
    further: tuple[Source, ...]

    def for_capsule(self, check: Check) -> dict[str, Capture]:
        if missing := [source for source in self.further if source.name not in self.captures]:
            self.captures.update(read_sources(missing, self.places))
        wanted = {source.name for source in (*check.sources, *self.further)}
        return {name: capture for name, capture in self.captures.items() if name in wanted}


def read_sources(sources: list[Source], places: Places, at_once: int = AT_ONCE) -> dict[str, Capture]:
    return collect(sources, {"MINIVM_UNFIT": str(UNFIT)}, places.state / "stuck", at_once=at_once)


def with_evidence(judged: Judged, before: Verdict | None, check: Check, readings: Readings) -> Judged:
    """Write a capsule at the start of an incident; its path stays in the verdict while the incident lasts."""
    verdict = judged.verdict
    if verdict.result is not Result.PROBLEM:
        return judged
    if before and before.result is Result.PROBLEM and before.subject == verdict.subject and before.evidence:
        return replace(judged, verdict=replace(verdict, evidence=before.evidence))
    try:
        kept = str(_write_capsule(verdict, check, readings))
    except OSError as error:
        kept = f"not kept: {error.strerror}"
    return replace(judged, verdict=replace(verdict, evidence=kept))


def _write_capsule(verdict: Verdict, check: Check, readings: Readings) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(verdict.at))
    facts = {
        "about": f"evidence: {verdict.check}: {verdict.reason}",
        "origin": f"captured on {os.uname().nodename}",
        "now": verdict.at,
        "commit": verdict.commit,
        "boot_id": verdict.boot_id,
        "environment": expectations(os.environ),
        "versions": {"kernel": os.uname().release, "python": sys.version.split()[0]},
        "expect": {verdict.check: f"{verdict.result} {verdict.class_}"},
        "previous": {verdict.check: dict(recall(readings.places, verdict.check, verdict.boot_id))},
        "verdicts": [verdict.to_json()],
    }
    name = f"{stamp}-{verdict.check}-{os.getpid()}"
    return write_case(readings.places.capsules, name, readings.for_capsule(check), facts)
