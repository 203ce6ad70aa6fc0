"""One round of checks on this node: read the sources once, judge every check, write the verdicts. One process.

python3 -I -m gitsync.health_run --tree TREE --commit COMMIT [--when prolog | --checks a,b] [--due]
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .health_api import Builtin, Capture, Check, CheckModule, Class, Failure, Hardware, Result, Source, When
from .health_cases import read_case, write_case
from .health_collect import collect
from .health_judge import Judged, Setting, judge
from .health_load import UNFIT, load_checks, load_limits
from .health_places import Places, asks_slurm, due, expectations, present
from .verdict import Verdict, boot_id, read_verdict, write_json, write_verdict

ROUND_WAIT_S = 5.0
# Kept with any capsule: how the last job's communication went.
ALWAYS: tuple[Source, ...] = (Builtin("nccl_log"),)


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
    now, boot = time.time(), boot_id()
    if expect is None:
        # slurmd may start a prolog without the pod's environment: the background round has kept what was promised.
        expect = expectations(os.environ) or _promised(places)
    loaded = load_checks(tree, names)
    selected = {
        name: module
        for name, module in loaded.checks.items()
        if (names is not None or when is None or when in module.CHECK.when)
        and (names is not None or when is When.DEEP or module.CHECK.when != frozenset({When.DEEP}))
        and not (without_slurm and asks_slurm(module.CHECK))
        and not (only_due and not due(module.CHECK.period_s, read_verdict(places.verdicts / f"{name}.json"), now, boot))
    }
    has = {hardware: present(hardware, expect) for hardware in Hardware}
    running = {name: module for name, module in selected.items() if has[module.CHECK.hardware] or captures is not None}
    setting = Setting(commit, boot, now, expect)
    with contextlib.suppress(OSError):
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    sources = {source.name: source for module in running.values() for source in module.CHECK.sources}
    declared = [source for module in loaded.checks.values() for source in module.CHECK.sources]
    evidence = [] if captures is not None else [*(source for source in declared if source.evidence), *ALWAYS]
    taken = dict(captures or collect(sources.values(), _environment(), places.state / "stuck"))
    for name in sources:
        taken.setdefault(name, Capture("", Failure.MISSING, f"{name}: not in this recording"))
    done: list[Judged] = []
    for name, module in selected.items():
        old = read_verdict(places.verdicts / f"{name}.json")
        if name not in running:
            judged = Judged(_absent(module.CHECK, setting), {})
        else:
            memory = _recall(places.memory(name), boot)
            judged = judge(module, taken, lambda file: load_limits(tree, file), setting, memory)
            judged = _with_evidence(judged, old, module, taken, evidence, places)
            _remember(places.memory(name), boot, judged.state)
        with contextlib.suppress(OSError):
            write_verdict(places.verdicts, judged.verdict)
        done.append(judged)
    for name, why in loaded.broken.items():
        verdict = Verdict(name, Result.UNKNOWN, Class.NODE, f"the check is broken: {why}"[:500], commit=commit, at=now)
        done.append(Judged(verdict, {}, why))
    if names is None:
        _write_index(places, tree, commit, boot, loaded.checks, has, now, expect)
    return done


def _environment() -> dict[str, str]:
    return {"MINIVM_UNFIT": str(UNFIT)}


def _absent(check: Check, setting: Setting) -> Verdict:
    reason = f"not for this node: it has no {check.hardware.value}, and none is expected"
    verdict = Verdict(check.name, Result.UNKNOWN, check.class_, reason, commit=setting.commit, boot_id=setting.boot_id)
    return replace(verdict, at=setting.now, expires=setting.now + check.lifetime_s, applies=False)


def _with_evidence(
    judged: Judged,
    old: Verdict | None,
    module: CheckModule,
    taken: dict[str, Capture],
    evidence: Iterable[Source],
    places: Places,
) -> Judged:
    """A capsule at the start of each incident, and its path for as long as the incident lasts."""
    verdict = judged.verdict
    if verdict.result is not Result.PROBLEM:
        return judged
    if old is not None and old.result is Result.PROBLEM and old.subject == verdict.subject and old.evidence:
        return replace(judged, verdict=replace(verdict, evidence=old.evidence))
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(verdict.at))
    # Read now if the round did not, and once for all the checks that failed in it.
    missing = [source for source in evidence if source.name not in taken]
    if missing:
        taken.update(collect(missing, _environment(), places.state / "stuck"))
    wanted = {source.name for source in [*module.CHECK.sources, *evidence]}
    kept = {name: capture for name, capture in taken.items() if name in wanted}
    facts = {
        "about": f"evidence: {verdict.check}: {verdict.reason}",
        "origin": f"captured on {os.uname().nodename}",
        "now": verdict.at,
        "commit": verdict.commit,
        "boot_id": verdict.boot_id,
        "environment": expectations(os.environ),
        "versions": {"kernel": os.uname().release, "python": sys.version.split()[0]},
        "expect": {verdict.check: f"{verdict.result} {verdict.class_}"},
        "previous": {verdict.check: dict(_recall(places.memory(verdict.check), verdict.boot_id))},
        "verdicts": [verdict.to_json()],
    }
    try:
        path = write_case(places.capsules, f"{stamp}-{verdict.check}-{os.getpid()}", kept, facts)
    except OSError as error:
        return replace(judged, verdict=replace(verdict, evidence=f"not kept: {error.strerror}"))
    return replace(judged, verdict=replace(verdict, evidence=str(path)))


def _write_index(
    places: Places,
    tree: Path,
    commit: str,
    boot: str,
    checks: Mapping[str, CheckModule],
    has: Mapping[Hardware, bool],
    now: float,
    expect: Mapping[str, str],
) -> None:
    """What the prolog needs to know about the checks without loading them."""
    listed = {
        name: {
            "when": sorted(module.CHECK.when),
            "period_s": module.CHECK.period_s,
            "applies": has[module.CHECK.hardware],
        }
        for name, module in sorted(checks.items())
    }
    with contextlib.suppress(OSError):
        facts = {"commit": commit, "tree": str(tree), "boot_id": boot, "at": now, "expect": dict(expect)}
        write_json(places.index, {**facts, "checks": listed})


def _promised(places: Places) -> Mapping[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads(places.index.read_bytes())["expect"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _recall(path: Path, boot: str) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_bytes())
        return dict(data["state"]) if data["boot_id"] == boot else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _remember(path: Path, boot: str, state: Mapping[str, Any]) -> None:
    if not state and not path.exists():
        return
    with contextlib.suppress(OSError):
        write_json(path, {"boot_id": boot, "state": dict(state)}, 0o600)


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
    with _round(places, patient=not options.due) as alone:
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
    ran = [
        {
            "check": item.verdict.check,
            "result": item.verdict.result,
            "reason": item.verdict.reason,
            "broken": item.broken,
        }
        for item in done
        if item.verdict.applies
    ]
    print(json.dumps({"ran": ran}))
    return 0


@contextlib.contextmanager
def _round(places: Places, *, patient: bool) -> Iterator[bool]:
    """One round at a time; a prolog waits a little for it and then goes on: each file is published whole anyway."""
    try:
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(places.state / "round.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        deadline = time.monotonic() + (ROUND_WAIT_S if patient else 0.0)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
                break
            except OSError:
                alone = False
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
        yield alone
    finally:
        os.close(fd)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
