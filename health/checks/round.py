"""One round of checks on this node: read the sources once, judge every check, write the verdicts. One process.

python3 -I -m health.checks.round --tree TREE --commit COMMIT [--when prolog | --checks a,b] [--due]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from health.api import Capture, Check, CheckModule, Class, Failure, Hardware, Result, When
from health.checks.cases import read_case
from health.checks.evidence import ALWAYS, Readings, read_sources, with_evidence
from health.checks.hardware import expectations, present
from health.checks.judge import Judged, Setting, judge
from health.checks.load import Loaded, load_checks, load_limits
from health.checks.notes import bury, one_round, promised, recall, remember, write_index
from health.places import Places, asks_slurm, due
from health.verdict import Verdict, boot_id, read_verdict, write_verdict


@dataclass(frozen=True, slots=True)
class Asked:
    """Which of a tree's checks a round is about."""

    when: When | None = None
    by_name: bool = False
    only_due: bool = False
    without_slurm: bool = False

    def takes(self, check: Check, known: Verdict | None, setting: Setting) -> bool:
        if not self.by_name:
            if self.when is not None and self.when not in check.when:
                return False
            # A deep check runs when it is asked for, and never because everything is.
            if self.when is not When.DEEP and check.when == frozenset({When.DEEP}):
                return False
        if self.without_slurm and asks_slurm(check):
            return False
        return not self.only_due or due(check.period_s, known, setting.now, setting.boot_id)


def run(
    tree: Path,
    commit: str,
    *,
    when: When | None = None,
    names: Iterable[str] | None = None,
    only_due: bool = False,
    without_slurm: bool = False,
    places: Places | None = None,
    expect: Mapping[str, str] | None = None,
    captures: Mapping[str, Capture] | None = None,
) -> list[Judged]:
    """`captures` stands in for the node (a planted recording); otherwise the sources are read here."""
    places = places or Places.from_environment()
    if expect is None:
        # slurmd may start a prolog without the pod's environment: the background round has kept what was promised.
        expect = expectations(os.environ) or promised(places)
    setting = Setting(commit, boot_id(), time.time(), expect)
    loaded = load_checks(tree, names)
    known = {name: read_verdict(places.verdicts / f"{name}.json") for name in loaded.checks}
    asked = Asked(when, names is not None, only_due, without_slurm)
    selected = {
        name: module for name, module in loaded.checks.items() if asked.takes(module.CHECK, known[name], setting)
    }
    has = {hardware: present(hardware, expect) for hardware in Hardware}
    fitting = {name: module for name, module in selected.items() if captures is not None or has[module.CHECK.hardware]}
    with contextlib.suppress(OSError):
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    readings = _read(loaded, list(fitting.values()), places, captures)
    done: list[Judged] = []
    for name, module in selected.items():
        if name in fitting:
            memory = recall(places, name, setting.boot_id)
            judged = judge(module, readings.captures, lambda file: load_limits(tree, file), setting, memory)
            judged = with_evidence(judged, known[name], module.CHECK, readings)
            remember(places, name, setting.boot_id, judged.state)
        else:
            judged = Judged(_absent(module.CHECK, setting), {})
        with contextlib.suppress(OSError):
            write_verdict(places.verdicts, judged.verdict)
        done.append(judged)
    done += [_broken(name, why, setting) for name, why in loaded.broken.items()]
    if names is None:
        # A prolog may still run an earlier commit, which has no say in what there is.
        if captures is None and when in {When.BACKGROUND, When.BOOT}:
            bury(places, {*loaded.checks, *loaded.broken})
        write_index(places, tree, loaded.checks, has, setting, loaded.broken)
    return done


def _read(
    loaded: Loaded, modules: list[CheckModule], places: Places, captures: Mapping[str, Capture] | None
) -> Readings:
    """Each source once, however many checks want it."""
    sources = {source.name: source for module in modules for source in module.CHECK.sources}
    if captures is None:
        declared = [source for module in loaded.checks.values() for source in module.CHECK.sources if source.evidence]
        return Readings(places, read_sources(list(sources.values()), places), (*declared, *ALWAYS))
    absent = {name: Capture("", Failure.MISSING, f"{name}: not in this recording") for name in sources}
    return Readings(places, {**absent, **captures}, ())


def _absent(check: Check, setting: Setting) -> Verdict:
    reason = f"not for this node: it has no {check.hardware.value}, and none is expected"
    verdict = Verdict(check.name, Result.UNKNOWN, check.class_, reason, commit=setting.commit, boot_id=setting.boot_id)
    return replace(verdict, at=setting.now, expires=setting.now + check.lifetime_s, applies=False)


def _broken(name: str, why: str, setting: Setting) -> Judged:
    """Told to whoever asked for the round, and never written: the last good verdict stands until it expires."""
    reason = f"the check is broken: {why}"[:500]
    return Judged(Verdict(name, Result.UNKNOWN, Class.NODE, reason, commit=setting.commit, at=setting.now), {}, why)


def main(arguments: list[str]) -> int:
    """Prints one JSON line: what each check said. The exit code says only whether the round could be run."""
    import argparse

    parser = argparse.ArgumentParser(prog="health_run")
    parser.add_argument("--tree", required=True, type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--when", type=When)
    parser.add_argument("--checks", type=lambda text: text.split(","))
    parser.add_argument("--due", action="store_true")
    parser.add_argument("--without-slurm", action="store_true", help="leave out checks that ask Slurm")
    parser.add_argument("--recording", type=Path)
    options = parser.parse_args(arguments)
    places = Places.from_environment()
    with one_round(places, patient=not options.due) as alone:
        if options.due and not alone:
            print(json.dumps({"ran": [], "busy": True}))
            return 0
        done = run(
            options.tree,
            options.commit,
            when=options.when,
            names=options.checks,
            only_due=options.due,
            without_slurm=options.without_slurm,
            places=places,
            captures=read_case(options.recording).captures if options.recording else None,
        )
    print(json.dumps({"ran": [_told(judged) for judged in done if judged.verdict.applies]}))
    return 0


def _told(judged: Judged) -> dict[str, str]:
    verdict = judged.verdict
    return {"check": verdict.check, "result": verdict.result, "reason": verdict.reason, "broken": judged.broken}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
