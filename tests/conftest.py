"""Shared setup of every test: hypothesis profiles, and an environment that has every package of the project."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings

# No deadline: these machines are shared, and time is never what a property is about. In CI the search is the same at
# every run, so that what fails there fails again here; elsewhere it looks for new cases each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_sessionstart() -> None:
    """Stop when the installed packages are out of date: a test's process with -I does not see a new package."""
    if subprocess.run([sys.executable, "-I", "-c", "import ground"], capture_output=True).returncode:
        pytest.exit("pyproject.toml has another list of packages than .venv: touch pyproject.toml; make .venv/ready", 4)
