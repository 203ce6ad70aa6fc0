"""The version is defined in one place, and everything that shows a version agrees with it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from ground.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def test_the_chart_has_the_version() -> None:
    chart = yaml.safe_load((ROOT / "cluster/chart/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_package_reads_the_version_and_states_none_of_its_own() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in pyproject["project"] and pyproject["project"]["dynamic"] == ["version"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ground.version.VERSION"}


def test_the_changelog_has_a_section_for_the_version() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert VERSION in [section.partition(" - ")[0] for section in sections]  # with its day, since releases have one


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["build.py"], "minivm"),
        (["-m", "gitsync.cli"], "gitsync"),
        (["-c", "from init.cli import main; main()"], "minivm"),
    ],
)
def test_every_program_shows_the_version(program: list[str], name: str) -> None:
    done = subprocess.run([sys.executable, *program, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{name}, version {VERSION}\n"


def test_every_package_that_is_installed_is_typed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert [name for name in packages if not (ROOT / name.rstrip("*") / "py.typed").is_file()] == []
