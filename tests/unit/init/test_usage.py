"""Commands of `minivm` that are programs of their own: each runs, and its help names what people type."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import init.cli

NAMES = re.findall(r'passed_on\(\s*"(\w+)"', Path(init.cli.__file__).read_text())
NAMES.remove("drift")  # it has no options


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_command_that_people_type(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "init.cli", name, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.lower().startswith(f"usage: {'' if name == 'gitsync' else 'minivm '}{name} ")
