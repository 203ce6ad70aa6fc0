"""Commands of `minivm` that are programs of their own: each runs, and its help names what people type."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from init.command import PASSED_ON

NAMES = [name for name in PASSED_ON if name != "drift"]  # it has no options


@pytest.mark.parametrize("before", [["-c", "from init.command import main; main()"], ["-m", "init.cli"]])
@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_command_that_people_type(name: str, before: list[str]) -> None:
    done = subprocess.run([sys.executable, *before, name, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.lower().startswith(f"usage: {'' if name == 'gitsync' else 'minivm '}{name} ")


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["drift"], ["completion", "bash"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str], is_unbuffered: str) -> None:
    """Like `minivm status | head -1`: without a terminal the output is written at the exit."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from init.command import main; main()", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": is_unbuffered}
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env)
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_minivm_job_starts_without_what_it_does_not_use() -> None:
    code = "import atexit, sys; from init.command import main; atexit.register(lambda: print(*sys.modules)); main()"
    done = subprocess.run([sys.executable, "-c", code, "job", "--help"], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "health.jobs.ask" in loaded and not loaded & {"click", "health.jobs.output", "tarfile", "logging"}
