"""`python -m tests`: every test, in two runs side by side; with arguments pytest's own, one run.

What computes and what waits for whole clusters: one after the other, half of a machine's processors has nothing to do
for most of the time. Tests of what images hold come after those that compute, so that the two runs take about as long.
The first run is shown as it goes, the other from its beginning once the first is over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The slowest tests are listed at the end, as the place to begin when the run becomes too long.
PYTEST = (sys.executable, "-m", "pytest", "--durations=150", "--durations-min=5")
# The first ones say within seconds that a rule is broken.
FIRST = (
    *("tests/unit", "tests/process"),
    *(f"tests/container/{part}" for part in ("images", "gitsync", "health")),
    *(f"tests/kubernetes/{name}.py" for name in ("test_core", "test_configuration", "test_policies")),
    # Parts of a folder whose other modules are in the second run.
    *(
        f"tests/container/init/{name}.py"
        for name in ("test_returns", "test_slurm_conf", "test_state", "test_killed_early")
    ),
)


def side_by_side(first: Sequence[str], second: Sequence[str]) -> int:
    """Run both commands to their end and return the exit code of the first that failed."""
    with tempfile.TemporaryFile() as kept:
        other = subprocess.Popen(second, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=kept, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run(first, cwd=ROOT, check=False).returncode
            show_until_over(other, kept.fileno())
        finally:
            if other.poll() is None:
                other.send_signal(signal.SIGINT)  # it takes its pods away
                other.wait()
        return code or other.returncode


def show_until_over(process: subprocess.Popen[bytes], output: int) -> None:
    shown = 0
    while True:
        over = process.poll() is not None  # before the look, or what it wrote last is lost
        while data := os.pread(output, 1 << 16, shown):
            shown += len(data)
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        if over:
            return
        time.sleep(0.2)


def second(paths: Sequence[str]) -> list[str]:
    """Return pytest's arguments for the tests of these paths that are not in the first run."""
    rest = [path for path in paths if path not in FIRST]
    parts = [path for path in FIRST if any(path.startswith(f"{folder}/") for folder in rest)]
    return [*rest, *(f"--ignore={path}" for path in parts)]


def main(arguments: Sequence[str]) -> int:
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=ROOT, check=False).returncode
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    return side_by_side([*PYTEST, *FIRST], [*PYTEST, *second(settings["testpaths"])])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
