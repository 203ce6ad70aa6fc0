"""A case: the output of one node's tools, in a directory. Recordings, evidence capsules and replays are cases.

case.json            origin, and the verdict that each check must return
SOURCE.txt           the source's output
SOURCE.missing       (or .timeout, .failed, .truncated) a failed source, with the reason
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gitsync.errors import GitsyncError
from health.api import Capture, CheckModule, Failure, Result
from health.checks.active_checks import ACTIVE, list_active_checks
from health.checks.judge import Judged, Setting, judge
from health.checks.load import Loaded, load_checks, load_limits
from health.verdict import Class, read_mapping

KEYS = {"about", "origin", "expect", "now", "previous", "environment", "commit", "boot_id", "versions", "verdicts"}
# Limits of one source and of a capsule: a kernel that floods its log must not fill the node's disk.
SOURCE_LIMIT = 256 * 1024
CAPSULE_LIMIT = 2 * 1024 * 1024
CAPSULES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Case:
    path: Path
    captures: Mapping[str, Capture]
    origin: str = ""
    # check -> (result, class or None): the known meaning of a recording.
    expect: Mapping[str, tuple[Result, Class | None]] = field(default_factory=dict)
    now: float = 0.0
    previous: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    boot_id: str = ""


def read_case(path: Path) -> Case:
    data = _facts(path / "case.json")
    captures = {}
    for file in sorted(path.iterdir()):
        kind = file.suffix[1:]
        if not file.is_file():
            continue
        if kind == "txt":
            captures[file.stem] = Capture(file.read_text(errors="replace"))
        elif kind in {failure.value for failure in Failure}:
            text = file.read_text(errors="replace")
            captures[file.stem] = Capture(text, Failure(kind), text.strip() or kind)
    return Case(
        path,
        captures,
        str(data.get("origin", "")),
        {check: _parse_expected(value, path) for check, value in data.get("expect", {}).items()},
        data.get("now", 0.0),
        data.get("previous", {}),
        data.get("environment", {}),
        str(data.get("commit", "")),
        str(data.get("boot_id", "")),
    )


def _facts(file: Path) -> dict[str, Any]:
    data = read_mapping(file, "read a case")
    if stray := set(data) - KEYS:
        keys = ", ".join(sorted(KEYS))
        raise GitsyncError("read a case", f"unknown key {min(stray)!r}", file=file, hint=f"known: {keys}")
    for key in ("expect", "previous", "environment"):
        if not isinstance(data.get(key, {}), dict):
            raise GitsyncError("read a case", f"wanted a mapping, not {data[key]!r}", file=file, field=key)
    for check, memory in data.get("previous", {}).items():
        if not isinstance(memory, dict):
            problem = f"wanted a mapping, not {memory!r}"
            raise GitsyncError("read a case", problem, file=file, field=f"previous.{check}")
    if isinstance(data.get("now", 0.0), bool) or not isinstance(data.get("now", 0.0), int | float):
        problem = f"wanted seconds since 1970, not {data['now']!r}"
        raise GitsyncError("read a case", problem, file=file, field="now")
    return data


def _parse_expected(value: object, path: Path) -> tuple[Result, Class | None]:
    """Parse "problem", or "problem rma" where the class is part of the meaning."""
    result, _, class_ = str(value).partition(" ")
    try:
        return Result(result), Class(class_) if class_ else None
    except ValueError:
        problem = f"wanted ok, problem or unknown, optionally with a class, not {value!r}"
        raise GitsyncError("read a case", problem, file=path / "case.json", field="expect") from None


def judge_case(module: CheckModule, tree: Path, case: Case) -> Judged:
    """Run one check on a case. A source that the case lacks counts as a missing tool; without `now`, use the clock."""
    captures = {
        source.name: case.captures.get(source.name, Capture("", Failure.MISSING, f"{source.name}: not in this case"))
        for source in module.CHECK.sources
    }
    setting = Setting(case.commit, case.boot_id, case.now or time.time(), case.environment)
    return judge(
        module, captures, lambda name: load_limits(tree, name), setting, case.previous.get(module.CHECK.name, {})
    )


def replay(tree: Path, case: Case, names: Iterable[str] | None) -> list[Judged]:
    """Run every check for which the case has a source."""
    loaded = load_checks(tree, names)
    return [
        judge_case(module, tree, case)
        for module in loaded.checks.values()
        if any(source.name in case.captures for source in module.CHECK.sources)
    ]


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of testing a tree: its faults (none: it may be published) and what the recordings prove."""

    faults: tuple[str, ...]
    checks: frozenset[str]
    recordings: int
    # Each (check, result) that matched its recording's expectation.
    judged: tuple[tuple[str, Result], ...]

    def words(self) -> list[str]:
        sick = {check for check, result in self.judged if result is Result.PROBLEM}
        lines = [
            f"{len(self.checks)} checks load; on {self.recordings} recordings {len(self.judged)} verdicts are as they"
            f" should be, {sum(result is Result.PROBLEM for _, result in self.judged)} of them problems"
        ]
        unseen = sorted(self.checks - sick)
        if unseen:
            lines.append(f"no recording here is sick for: {', '.join(unseen)}")
        return lines


def examine(tree: Path) -> Examined:
    """Test a tree's checks against its own recordings.

    Every file loads, no two checks declare one source name differently, every threshold file reads, and each recording
    of the tree gets its expected verdict. The same holds for its active checks, which also say what they need.
    """
    passive, active = _examine(tree, "health.d"), _examine(tree, ACTIVE)
    needs = list_active_checks(tree)
    faults = [*passive.faults, *active.faults, *needs.broken.values()]
    faults += [
        f"{name}: {ACTIVE} takes Python files only" for name in sorted(active.checks - {*needs.checks, *needs.broken})
    ]
    faults += [f"{name}: is in health.d and in {ACTIVE}" for name in sorted(passive.checks & active.checks)]
    recordings = passive.recordings + active.recordings
    return Examined(tuple(faults), passive.checks | active.checks, recordings, (*passive.judged, *active.judged))


def _examine(tree: Path, kind: str) -> Examined:
    loaded = load_checks(tree, kind=kind)
    faults = list(loaded.broken.values()) + _source_clashes(loaded)
    judged: list[tuple[str, Result]] = []
    recordings = tried = 0
    for path in sorted((tree / kind / "recordings").glob("*/case.json")):
        try:
            case = read_case(path.parent)
        except GitsyncError as error:
            faults.append(str(error))
            continue
        recordings += 1
        for check, (result, class_) in sorted(case.expect.items()):
            if check not in loaded.checks:
                if check not in loaded.broken:
                    faults.append(f"{path.parent.name}: expects {check}, which is not in this tree")
                continue
            tried += 1
            got = judge_case(loaded.checks[check], tree, case)
            if got.broken:
                faults.append(f"{check} on {path.parent.name}: {got.broken}")
            elif got.verdict.result is not result or (class_ and got.verdict.class_ is not class_):
                expected = f"{result} {class_}" if class_ else str(result)
                actual = f"{got.verdict.result} {got.verdict.class_}: {got.verdict.reason}"
                faults.append(f"{check} on {path.parent.name}: wanted {expected}, got {actual}")
            else:
                judged.append((check, result))
    for module in loaded.checks.values():
        try:
            if module.CHECK.thresholds:
                load_limits(tree, module.CHECK.thresholds)
        except GitsyncError as error:
            faults.append(f"{module.CHECK.name}: {error}")
    if loaded.checks and not tried:
        faults.append(f"{kind}/recordings holds no case: nothing proves that the checks work")
    return Examined(tuple(faults), frozenset(loaded.checks), recordings, tuple(judged))


def _source_clashes(loaded: Loaded) -> list[str]:
    first: dict[str, tuple[str, object]] = {}
    faults = []
    for name, module in loaded.checks.items():
        for source in module.CHECK.sources:
            owner, known = first.setdefault(source.name, (name, source))
            if known != source:
                faults.append(f"{name} and {owner} declare the source {source.name!r} differently")
    return faults


def write_case(directory: Path, name: str, captures: Mapping[str, Capture], facts: Mapping[str, object]) -> Path:
    """Write an evidence capsule: complete under its name or not at all, and never above its size limit."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{name}.{os.getpid()}.{time.monotonic_ns()}"
    temporary.mkdir(mode=0o700)
    try:
        room = CAPSULE_LIMIT
        for source, capture in sorted(captures.items(), key=lambda item: len(item[1].text)):
            suffix = "txt" if capture.failure is None else capture.failure.value
            text = (capture.text if capture.failure is None else capture.why).encode()
            limit = min(SOURCE_LIMIT, room)
            if len(text) > limit:
                # Truncated text must never be replayed as complete, so store it as a truncated source. Keep the end:
                # logs have the newest lines last.
                suffix, text = Failure.TRUNCATED.value, text[-limit:] if limit else b""
            room -= len(text)
            (temporary / f"{source}.{suffix}").write_bytes(text)
        (temporary / "case.json").write_text(json.dumps(facts, indent=1))
        final = directory / name
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    cases = sorted((path for path in directory.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in cases[:-CAPSULES_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final
