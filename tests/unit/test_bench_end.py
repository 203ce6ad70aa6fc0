"""A bench that is terminated by a signal cleans up first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A bench area that has started something, and takes a while to clean it up.
AREA = """
import sys
from types import ModuleType
from bench import __main__ as bench
def area():
    try:
        print("begun", flush=True)
        sys.stdin.readline()
    finally:
        print("ending", flush=True)
        sys.stdin.readline()
        print("taken away", flush=True)
sys.modules["bench.init"] = made = ModuleType("bench.init")
made.main = area
bench.main(["init"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_is_told_to_end_and_once_more_and_takes_away_what_it_began(number: signal.Signals) -> None:
    command = [sys.executable, "-u", "-c", AREA]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as area:
        assert area.stdin and area.stdout
        while area.stdout.readline() != "begun\n":
            assert area.poll() is None
        area.send_signal(number)
        assert area.stdout.readline() == "ending\n"
        area.send_signal(signal.SIGTERM)
        area.stdin.write("\n")
        area.stdin.flush()
        assert area.stdout.readline() == "taken away\n"
        assert area.wait(60) == 128 + number
