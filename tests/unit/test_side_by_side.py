"""`make test` runs two suites at once: neither waits for the other, both report in full, and one failure fails both."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.__main__ import FIRST, ROOT, second

# Each process announces itself, and continues only once the other has done so.
MEET = """
import pathlib, sys, time
here, mine, other, code = pathlib.Path(sys.argv[1]), *sys.argv[2:]
(here / mine).touch()
end = time.monotonic() + 30
while not (here / other).exists():
    assert time.monotonic() < end, "alone"
    time.sleep(0.01)
print(mine, "is told", flush=True)
raise SystemExit(int(code))
"""


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (3, 2, 3)])
def test_both_run_at_once_and_both_are_told(tmp_path: Path, first: int, second: int, code: int) -> None:
    lines = [
        [sys.executable, "-c", MEET, str(tmp_path), mine, other, str(wanted)]
        for mine, other, wanted in (("a", "b", first), ("b", "a", second))
    ]
    program = f"import sys; from tests.__main__ import side_by_side; sys.exit(side_by_side({lines[0]!r}, {lines[1]!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines() == ["a is told", "b is told"]


def test_no_test_is_in_neither_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    paths = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    assert all((ROOT / path).exists() for path in FIRST)
    parts = [path for path in FIRST if path not in paths]
    assert second(paths) == [*(path for path in paths if path not in FIRST), *(f"--ignore={path}" for path in parts)]
    found = {test.parent.relative_to(ROOT).as_posix() for test in (ROOT / "tests/container").rglob("test_*.py")}
    assert sorted(found) == sorted(path for path in paths if path.startswith("tests/container"))
