"""Usage lines of commands that are programs of their own: people type `minivm NAME`, and so the help says."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("init.config_cli", "minivm config"),
        ("init.state_cli", "minivm state"),
        ("init.people_cli", "minivm people"),
        ("init.accounts_cli", "minivm accounts"),
        ("health.jobs", "minivm job"),
        ("health.active.preflight", "minivm preflight"),
        ("health.notify", "minivm notify"),
    ],
)
def test_help_names_the_command_that_people_type(module: str, name: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.lower().startswith(f"usage: {name} ")
