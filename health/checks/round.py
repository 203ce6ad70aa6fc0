"""Run one round of checks in this process: read the sources once, judge every check, write the verdicts.

python3 -I -m health.checks.round --tree TREE --commit COMMIT [--when prolog | --checks a,b] [--due]
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ground.files import locked, read_json, write_json
from health import gpus
from health.api import Builtin, Capture, Check, CheckModule, Class, Failure, Hardware, Result, Source, When
from health.checks.cases import read_case, write_case
from health.checks.collect import AT_ONCE, collect, list_matching
from health.checks.judge import Judged, Setting, judge
from health.checks.load import CheckSelection, Loaded, load_checks, load_limits, takes_the_machine
from health.places import Places, boot_id
from health.rounds import Index, Listed, read_index, summarise, write_deep, write_index
from health.script import UNFIT
from health.verdict import Verdict, read_verdict, write_verdict

# Files that a round leaves for later rounds and the prolog. All may be lost: a round then knows a little less.
ROUND_WAIT_S = 5.0
# Name prefix of the verdicts on broken scripts.
SCRIPTS = "scripts_"


def recall(places: Places, check: str, boot_id: str) -> Mapping[str, Any]:
    """Read what a check remembered since this boot."""
    data = read_json(places.memory(check))
    state = data.get("state")
    return state if data.get("boot_id") == boot_id and isinstance(state, dict) else {}


def remember(places: Places, check: str, boot_id: str, state: Mapping[str, Any]) -> None:
    path = places.memory(check)
    if not state and not path.exists():
        return
    with contextlib.suppress(OSError):
        write_json(path, {"boot_id": boot_id, "state": dict(state)}, 0o600)


def bury(places: Places, alive: Collection[str]) -> None:
    """Delete the verdicts of checks that are no longer in the tree.

    Keeps the verdicts of prolog and epilog scripts, which have other names.
    """
    for path in places.verdicts.glob("[!.]*.json"):
        name = path.stem
        if name not in alive and "." not in name and not name.startswith(SCRIPTS):
            forget(places, name)


def forget(places: Places, check: str) -> None:
    """Delete a check's verdict and its memory."""
    for path in (places.memory(check), places.verdict(check)):
        with contextlib.suppress(OSError):
            path.unlink()


def recall_promised(places: Places) -> Mapping[str, str]:
    """Return the hardware promised to the pod, recorded by the last round that had the pod's environment."""
    index = read_index(places.index)
    return index.expect if index else {}


@contextlib.contextmanager
def one_round(places: Places, within: float | None) -> Iterator[bool]:
    """Hold the lock on rounds; yield whether this round is alone.

    A prolog waits briefly and then goes on: each file is published atomically. None: a check that loads the whole
    machine waits for the end of the round before it.
    """
    try:
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(places.state / "round.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        alone = locked(fd, within or 0.0)
        if not alone and within is None:
            print("another round of checks runs; this one waits for its end", file=sys.stderr, flush=True)
            fcntl.flock(fd, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        os.close(fd)


# Evidence of an incident: a capsule written at its start, with the check's sources and other possible causes.
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
        names = {source.name for source in (*check.sources, *self.further)}
        return {name: capture for name, capture in self.captures.items() if name in names}


def read_sources(sources: list[Source], places: Places, at_once: int = AT_ONCE) -> dict[str, Capture]:
    return collect(sources, {"MINIVM_UNFIT": str(UNFIT)}, places.state / "stuck", at_once=at_once)


def add_evidence(judged: Judged, before: Verdict | None, check: Check, readings: Readings) -> Judged:
    """Write a capsule at the start of an incident; its path stays in the verdict while the incident lasts."""
    verdict = judged.verdict
    if verdict.result is not Result.PROBLEM:
        return judged
    if before and before.result is Result.PROBLEM and before.subject == verdict.subject and before.evidence:
        return replace(judged, verdict=replace(verdict, evidence=before.evidence))
    try:
        capsule = str(_write_capsule(verdict, check, readings))
    except OSError as error:
        capsule = f"not kept: {error.strerror}"
    return replace(judged, verdict=replace(verdict, evidence=capsule))


def _write_capsule(verdict: Verdict, check: Check, readings: Readings) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(verdict.at))
    facts = {
        "about": f"evidence: {verdict.check}: {verdict.reason}",
        "origin": f"captured on {os.uname().nodename}",
        "now": verdict.at,
        "commit": verdict.commit,
        "boot_id": verdict.boot_id,
        "environment": read_expectations(os.environ),
        "versions": {"kernel": os.uname().release, "python": sys.version.split()[0]},
        "expect": {verdict.check: f"{verdict.result} {verdict.class_}"},
        "previous": {verdict.check: dict(recall(readings.places, verdict.check, verdict.boot_id))},
        "verdicts": [verdict.to_json()],
    }
    name = f"{stamp}-{verdict.check}-{os.getpid()}"
    return write_case(readings.places.capsules, name, readings.for_capsule(check), facts)


def run(
    tree: Path, commit: str, selection: CheckSelection, places: Places, captures: Mapping[str, Capture] | None = None
) -> list[Judged]:
    """Run the selected checks; with `captures` (a recording) instead of the node's sources.

    Returns nothing if only due checks were requested and another round runs.
    """
    loaded = load_checks(tree, selection.names)
    selected_checks = [
        module.CHECK for module in loaded.checks.values() if selection.takes(module.CHECK, None, 0.0, "")
    ]
    whole = captures is None and any(takes_the_machine(check, selection.when) for check in selected_checks)
    within = None if whole else 0.0 if selection.only_due else ROUND_WAIT_S
    with one_round(places, within) as alone:
        if selection.only_due and not alone:
            return []
        return _run_locked(tree, commit, selection, places, captures, loaded, 1 if whole else AT_ONCE)


def _run_locked(
    tree: Path,
    commit: str,
    selection: CheckSelection,
    places: Places,
    captures: Mapping[str, Capture] | None,
    loaded: Loaded,
    at_once: int,
) -> list[Judged]:
    # slurmd may start a prolog without the pod's environment: the background round has recorded what was promised.
    expect = read_expectations(os.environ) or recall_promised(places)
    setting = Setting(commit, boot := boot_id(), time.time(), expect)
    known = {name: read_verdict(places.verdict(name)) for name in loaded.checks}
    selected = {
        name: module
        for name, module in loaded.checks.items()
        if selection.takes(module.CHECK, known[name], setting.now, setting.boot_id)
    }
    has = {hardware: is_present(hardware, expect) for hardware in Hardware}
    fitting = {name: module for name, module in selected.items() if captures is not None or has[module.CHECK.hardware]}
    readings = _read_sources(loaded, list(fitting.values()), places, captures, at_once)
    smi = readings.captures.get(gpus.SOURCE)
    if captures is None and smi is not None and not smi.failure:
        with contextlib.suppress(OSError):
            gpus.take(places.gpus, smi.text, setting.now)
    done: list[Judged] = []
    for name, module in selected.items():
        if name in fitting:
            memory = recall(places, name, setting.boot_id)
            judged = judge(module, readings.captures, lambda file: load_limits(tree, file), setting, memory)
            judged = add_evidence(judged, known[name], module.CHECK, readings)
            remember(places, name, setting.boot_id, judged.state)
        else:
            judged = Judged(_report_absent(module.CHECK, setting), {})
        with contextlib.suppress(OSError):
            write_verdict(places.verdicts, judged.verdict)
        done.append(judged)
    done += [_report_broken(name, reason, setting) for name, reason in loaded.broken.items()]
    if selection.names is None and selection.when is When.DEEP and captures is None and not selection.only_due:
        of_gpus = {name for name, module in fitting.items() if module.CHECK.hardware is Hardware.GPU}
        verdicts = [item.verdict for item in done if item.verdict.check not in loaded.broken]
        summary = summarise(verdicts, loaded.broken, boot, of_gpus)
        write_deep(places.deep, summary)
    if selection.names is None:
        # A prolog may still run an earlier commit, which does not decide what exists.
        if captures is None and selection.when in {When.BACKGROUND, When.BOOT}:
            bury(places, {*loaded.checks, *loaded.broken})
        with contextlib.suppress(OSError):
            write_index(places.index, _index(tree, loaded, has, setting))
    return done


def _index(tree: Path, loaded: Loaded, has: Mapping[Hardware, bool], setting: Setting) -> Index:
    listed = {
        name: Listed(
            frozenset(module.CHECK.when), module.CHECK.period_s, has[module.CHECK.hardware], module.CHECK.hardware.value
        )
        for name, module in loaded.checks.items()
    }
    broken = frozenset(loaded.broken)
    return Index(setting.commit, setting.boot_id, listed, str(tree), setting.now, setting.expect, broken)


def _read_sources(
    loaded: Loaded, modules: list[CheckModule], places: Places, captures: Mapping[str, Capture] | None, at_once: int
) -> Readings:
    """Read each source once, however many checks use it.

    `at_once` is 1 for deep checks: a diagnostic beside an all-reduce would report a slow GPU.
    """
    sources = {source.name: source for module in modules for source in module.CHECK.sources}
    if captures is None:
        declared = [source for module in loaded.checks.values() for source in module.CHECK.sources if source.evidence]
        return Readings(places, read_sources(list(sources.values()), places, at_once), (*declared, *ALWAYS))
    absent = {name: Capture("", Failure.MISSING, f"{name}: not in this recording") for name in sources}
    return Readings(places, {**absent, **captures}, ())


def _report_absent(check: Check, setting: Setting) -> Verdict:
    reason = f"not for this node: it has no {check.hardware.value}, and none is expected"
    verdict = Verdict(check.name, Result.UNKNOWN, check.class_, reason, commit=setting.commit, boot_id=setting.boot_id)
    return replace(verdict, at=setting.now, expires=setting.now + check.lifetime_s, applies=False)


def _report_broken(name: str, fault: str, setting: Setting) -> Judged:
    """Report a broken check to the caller without writing it: the last good verdict stays until it expires."""
    reason = f"the check is broken: {fault}"[:500]
    return Judged(Verdict(name, Result.UNKNOWN, Class.NODE, reason, commit=setting.commit, at=setting.now), {}, fault)


def perform(tree: Path, commit: str, selection: CheckSelection, captures: Mapping[str, Capture] | None = None) -> str:
    """Run a round and return its results as one JSON line."""
    done = run(tree, commit, selection, Places.from_environment(), captures)
    return json.dumps({"ran": [_summary(judged) for judged in done if judged.verdict.applies]})


def main(arguments: list[str]) -> int:
    """Print the results. The exit code says only if the round could run."""
    import argparse

    parser = argparse.ArgumentParser(prog="health_run")
    parser.add_argument("--tree", required=True, type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--when", type=When)
    parser.add_argument("--checks", type=lambda text: tuple(text.split(",")))
    parser.add_argument("--due", action="store_true")
    parser.add_argument("--without-slurm", action="store_true", help="leave out checks that query Slurm")
    parser.add_argument("--recording", type=Path)
    options = parser.parse_args(arguments)
    selection = CheckSelection(options.when, options.checks, options.due, options.without_slurm)
    captures = read_case(options.recording).captures if options.recording else None
    print(perform(options.tree, options.commit, selection, captures))
    return 0


def _summary(judged: Judged) -> dict[str, str]:
    verdict = judged.verdict
    return {"check": verdict.check, "result": verdict.result, "reason": verdict.reason, "broken": judged.broken}


# Hardware that a node has or was promised: checks of other hardware do not apply.
PRESENCE: Mapping[Hardware, tuple[str, ...]] = {
    Hardware.GPU: ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*"),
    Hardware.IB: ("/sys/class/infiniband/*",),
    Hardware.NVME: ("/dev/nvme[0-9]", "/sys/class/nvme/nvme*"),
}


def is_present(hardware: Hardware, expect: Mapping[str, str]) -> bool:
    """Tell if the node has the hardware or was promised it: a GPU that vanished is still promised."""
    if hardware is Hardware.ANY or expect.get(hardware.value, "0") not in {"", "0"}:
        return True
    if hardware is Hardware.GPU and any(
        # The bus shows the GPU even if no driver is loaded.
        Path(path).read_text().strip() == "0x10de"
        and (Path(path).parent / "class").read_text().startswith(("0x0300", "0x0302"))
        for path in list_matching("/sys/bus/pci/devices/*/vendor")
    ):
        return True
    return any(list_matching(pattern) for pattern in PRESENCE[hardware])


def read_expectations(environment: Mapping[str, str]) -> dict[str, str]:
    """Read MINIVM_EXPECT_GPUS=8 and the like, as {"gpu": "8"}."""
    names = {"MINIVM_EXPECT_GPUS": "gpu", "MINIVM_EXPECT_IB": "ib", "MINIVM_EXPECT_NVME": "nvme"}
    return {key: environment[name] for name, key in names.items() if environment.get(name, "").isdecimal()}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
