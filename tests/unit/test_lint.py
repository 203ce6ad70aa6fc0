"""Every shell script passes shellcheck; `make lint` checks the Python code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shell_scripts() -> list[Path]:
    """Return every tracked file that a shell runs, by its first line."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or "tests/recordings" in name:
            continue
        with path.open("rb") as file:
            first = file.readline(80)
        if (first.startswith(b"#!") and first.split()[0].rsplit(b"/", 1)[-1] in {b"sh", b"bash"}) or (
            first.startswith(b"#!/usr/bin/env") and first.split()[-1] in {b"sh", b"bash"}
        ):
            found.append(path)
    return found


def test_shell_is_clean() -> None:
    scripts = shell_scripts()
    assert scripts, "no shell script found: the listing is broken, .ci/run is one"
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck: make test installs it")
    done = subprocess.run(["shellcheck", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
