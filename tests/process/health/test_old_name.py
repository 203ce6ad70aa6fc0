"""Checks of a site outlive images: one that was written against `gitsync.health_api` loads, runs and is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from health.checks.load import load_checks
from tests.process.runner_world import World, make

# What the old name offered in the last image that had no other: none of it may go.
OFFERED = (
    "Builtin", "Capture", "Check", "Class", "Command", "Context", "Failure", "Files", "Finding", "Hardware", "Inputs",
    "Limits", "Result", "Source", "Unreadable", "UserMade", "When", "ok", "problem", "unknown",
)  # fmt: skip
TAKEN = """
Check, Class, Files, When = api.Check, api.Class, api.Files, api.When
ok, problem = api.ok, api.problem
"""
IMPORTS = {
    "from": "from gitsync.health_api import Check, Class, Files, When, ok, problem",
    "star": "from gitsync.health_api import *",
    "module": f"import gitsync.health_api as api{TAKEN}",
    "package": f"from gitsync import health_api as api{TAKEN}",
    "both": "from gitsync.health_api import Check, Class, Files, When\nfrom health.api import ok, problem",
}
CHECK = """
{imports}

CHECK = Check(
    name={name!r}, about="the fan turns", class_=Class.MANUAL, period_s=60, when=frozenset({{When.BACKGROUND}}),
    sources=(Files("fan", ({fact!r},)),), thresholds="fans",
)

def parse(inputs):
    return float(inputs["fan"].split()[-1])

def judge(rpm, context):
    least = context.limits.default.number("rpm_min")
    yield problem(f"it turns at {{rpm:.0f}}") if rpm < least else ok("it turns")
"""
IDENTICAL = """
import sys
first = sys.argv[1]
import importlib
importlib.import_module(first)
old, new = importlib.import_module("gitsync.health_api"), importlib.import_module("health.api")
from health import verdict
for name in sys.argv[2:]:
    assert getattr(old, name) is getattr(new, name), name
assert isinstance(old.ok("fine"), new.Finding) and isinstance(new.ok("fine"), verdict.Finding)
assert old.Class is verdict.Class and old.When.BOOT is new.When.BOOT
try:
    raise old.Unreadable("no fan")
except new.Unreadable:
    print("one")
"""


@pytest.fixture
def site(tmp_path: Path) -> World:
    """Site tree from before the move: its checks, a threshold, a recording."""
    world = make(tmp_path)
    (tmp_path / "fan").write_text("200\n")
    world.script("lib/thresholds/fans.json", '{"default": {"rpm_min": 600}}', 0o644)
    for name, imports in IMPORTS.items():
        text = CHECK.format(imports=imports, name=name, fact=str(tmp_path / "fan"))
        world.script(f"health.d/{name}.py", text, 0o644)
    expect = dict.fromkeys(IMPORTS, "problem manual")
    world.script("health.d/recordings/stands/case.json", json.dumps({"about": "it stands", "expect": expect}), 0o644)
    world.script("health.d/recordings/stands/fan.txt", "0\n", 0o644)
    return world


def program(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-m", *arguments]
    return subprocess.run(argv, env=world.environment, capture_output=True, text=True, timeout=60)


def test_checks_written_against_the_old_name_run_and_are_judged(site: World) -> None:
    done = program(site, "health.checks.round", "--tree", str(site.tree), "--commit", "zero", "--when", "background")
    assert done.returncode == 0, done.stderr
    said = {item["check"]: item for item in json.loads(done.stdout)["ran"]}
    assert {name: item["result"] for name, item in said.items()} == dict.fromkeys(IMPORTS, "problem")
    assert {item["broken"] for item in said.values()} == {""}
    for name in IMPORTS:
        verdict = site.verdict(name)
        assert (verdict["result"], verdict["class"], verdict["reason"]) == ("problem", "manual", "it turns at 200")


def test_gitsync_publishes_a_tree_whose_checks_know_the_old_name(site: World) -> None:
    done = program(site, "health.cli", "selftest", str(site.tree))
    assert done.returncode == 0, done.stderr
    assert f"{len(IMPORTS)} checks load" in done.stdout


def test_a_process_that_has_loaded_both_has_one_of_each(site: World) -> None:
    loaded = load_checks(site.tree)
    assert not loaded.broken
    assert {type(module.CHECK) for module in loaded.checks.values()} == {type(loaded.checks["both"].CHECK)}


@pytest.mark.parametrize("first", ["gitsync.health_api", "health.api"])
def test_both_names_mean_the_same_classes_whichever_comes_first(first: str) -> None:
    argv = [sys.executable, "-I", "-c", IDENTICAL, first, *OFFERED]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
