"""Fuzzed tool output: no parser turns it into "ok" by accident."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from health.api import Capture, Result
from health.checks.cases import Case, judge_case, read_case
from health.checks.load import load_checks

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "scripts"
CHECKS = load_checks(TREE).checks
SICK = [
    (check, path.parent)
    for path in sorted((ROOT / "tests/recordings").rglob("case.json"))
    for check, (result, _) in read_case(path.parent).expect.items()
    if result is Result.PROBLEM
]
# Plain lists of items, in which a missing line cannot be noticed.
OPEN_LISTS = {"df", "df_inodes", "lspci", "meminfo", "buddyinfo"}
# Words of real tools, so that the fuzz gets past the first line.
WORDS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "N/A",
        "None",
        "Yes",
        "No",
        "Enabled",
        "ok",
        "hung",
        "up",
        "Active",
        "LinkUp",
        "{}",
        "[]",
        "==>",
        "<==",
        "GPU",
        "Link",
        ":",
        "=",
        "%",
        "kB",
        "0x0",
        "[",
        "# end:",
    ]
)
TEXT = st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=60).map(" ".join), st.binary(max_size=200).map(repr))
QUIET = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", sorted(CHECKS))
@QUIET
@given(data=st.data())
def test_arbitrary_output_is_never_ok(name: str, data: st.DataObject) -> None:
    captures = {source.name: Capture(data.draw(TEXT)) for source in CHECKS[name].CHECK.sources}
    got = judge_case(CHECKS[name], TREE, Case(Path("fuzz"), captures, now=1736849472.0))
    assert got.verdict.result is not Result.OK, got.verdict.reason
    assert not got.broken, got.broken


def judge(check: str, case: Case, source: str, text: str) -> tuple[Result, str]:
    captures = {**case.captures, source: Capture(text)}
    changed = Case(case.path, captures, case.origin, case.expect, case.now, case.previous, case.environment)
    got = judge_case(CHECKS[check], TREE, changed)
    assert not got.broken, f"{check}: {got.broken}"
    return got.verdict.result, got.verdict.reason


@pytest.mark.parametrize(("check", "path"), SICK, ids=[f"{check}-{path.name}" for check, path in SICK])
def test_a_sick_output_with_one_damaged_value_is_never_ok(check: str, path: Path) -> None:
    """Output with a problem never becomes ok when one value is damaged.

    Each line in turn has its last word replaced by noise; at most 15 lines of each source are sampled.
    """
    case = read_case(path)
    chance = random.Random(f"{check}{path.name}")
    for source in CHECKS[check].CHECK.sources:
        if source.name not in case.captures or case.captures[source.name].failure:
            continue
        lines = case.captures[source.name].text.splitlines()
        for number in sorted(chance.sample(range(len(lines)), min(15, len(lines)))):
            if not lines[number].strip() or (source.name == "kernel_log" and lines[number].startswith("[")):
                # A changed word in a log line is simply another log line, and cannot be noticed.
                continue
            damaged = [*lines]
            damaged[number] = lines[number].rsplit(maxsplit=1)[0] + " \x00¿?" if " " in lines[number].strip() else "¿?"
            result, reason = judge(check, case, source.name, "\n".join(damaged))
            assert result is not Result.OK, f"line {number + 1}, {lines[number]!r} damaged: {reason}"


@pytest.mark.parametrize(("check", "path"), SICK, ids=[f"{check}-{path.name}" for check, path in SICK])
def test_a_sick_output_without_the_line_that_tells_is_never_ok(check: str, path: Path) -> None:
    """Output with a problem never becomes ok when the line that shows it is missing.

    A required field that is absent from a structured output gives `unknown`.
    """
    case = read_case(path)
    chance = random.Random(f"{path.name}{check}")
    for source in CHECKS[check].CHECK.sources:
        if source.name not in case.captures or case.captures[source.name].failure or source.name in OPEN_LISTS:
            continue
        lines = case.captures[source.name].text.splitlines()
        for number in sorted(chance.sample(range(len(lines)), min(15, len(lines)))):
            result, reason = judge(check, case, source.name, "\n".join([*lines[:number], *lines[number + 1 :]]))
            assert result is not Result.OK, f"line {number + 1}, {lines[number]!r} removed: {reason}"
