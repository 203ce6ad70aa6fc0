"""`make test` runs its suites at once: none waits for another, all report in full, and one failure fails all."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.__main__ import ROOT, RUNS, runs

# Each process announces itself, and continues only once the others have done so.
MEET = """
import pathlib, sys, time
here, mine, code = pathlib.Path(sys.argv[1]), *sys.argv[2:]
(here / mine).touch()
end = time.monotonic() + 120
while len(list(here.iterdir())) < 3:
    assert time.monotonic() < end, "alone"
    time.sleep(0.01)
print(mine, "is told", flush=True)
raise SystemExit(int(code))
"""


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0, 0), 0), ((1, 0, 0), 1), ((0, 2, 0), 2), ((0, 0, 4), 4), ((3, 2, 4), 3)]
)
def test_all_run_at_once_and_all_are_told(tmp_path: Path, codes: tuple[int, ...], code: int) -> None:
    lines = [
        [sys.executable, "-c", MEET, str(tmp_path), mine, str(wanted)]
        for mine, wanted in zip("abc", codes, strict=True)
    ]
    program = f"import sys; from tests.__main__ import side_by_side; sys.exit(side_by_side(*{lines!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines() == ["a is told", "b is told", "c is told"]


def test_each_test_is_in_one_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    paths = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    named = [path for run in RUNS for path in run]
    assert len(set(named)) == len(named)
    assert all((ROOT / path).exists() for path in named)
    *firsts, last = runs(paths)
    assert firsts == [list(run) for run in RUNS]
    parts = [path for path in named if path not in paths]
    assert last == [*(path for path in paths if path not in named), *(f"--ignore={path}" for path in parts)]
    found = {test.parent.relative_to(ROOT).as_posix() for test in (ROOT / "tests/container").rglob("test_*.py")}
    assert sorted(found) == sorted(path for path in paths if path.startswith("tests/container"))
