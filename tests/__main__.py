"""`python -m tests`: every test, in three runs side by side; with arguments pytest's own, one run.

What computes, what waits for pods and what waits for whole clusters: one after the other, a machine's processors have
nothing to do for most of the time. The runs take about as long on two processors.
The first run is shown as it goes, each other from its beginning once those before it are over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The slowest tests are listed at the end, as the place to begin when the run becomes too long.
PYTEST = (sys.executable, "-m", "pytest", "--durations=150", "--durations-min=5")
# The first ones say within seconds that a rule is broken. Every other path of pytest's `testpaths` is in the last run.
RUNS = (
    ("tests/unit", "tests/process", *(f"tests/container/{part}" for part in ("images", "gitsync", "health"))),
    (
        "tests/container/init",
        *(f"tests/kubernetes/{name}.py" for name in ("test_core", "test_configuration", "test_policies")),
        # Parts of a folder whose other modules are in the last run; these do not use the cluster that those share.
        *(f"tests/cluster/{name}.py" for name in ("test_two_controllers", "test_releases")),
    ),
)


def side_by_side(*commands: Sequence[str]) -> int:
    """Run all commands to their end and return the exit code of the first that failed."""
    with ExitStack() as stack:
        others = [stack.enter_context(started(command)) for command in commands[1:]]
        code = subprocess.run(commands[0], cwd=ROOT, check=False).returncode
        for process, output in others:
            show_until_over(process, output)
            code = code or process.returncode
        return code


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield the process and the descriptor of its output."""
    with tempfile.TemporaryFile() as kept:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=kept, stderr=subprocess.STDOUT)
        try:
            yield process, kept.fileno()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it takes its pods away
                process.wait()


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


def runs(paths: Sequence[str]) -> list[list[str]]:
    """Return each run's arguments of pytest for the tests of these paths."""
    named = [path for run in RUNS for path in run]
    rest = [path for path in paths if path not in named]
    parts = [path for path in named if any(path.startswith(f"{folder}/") for folder in rest)]
    return [*map(list, RUNS), [*rest, *(f"--ignore={path}" for path in parts)]]


def main(arguments: Sequence[str]) -> int:
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=ROOT, check=False).returncode
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    return side_by_side(*([*PYTEST, *run] for run in runs(settings["testpaths"])))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
