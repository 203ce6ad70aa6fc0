"""A module that could not be found once is found the next time, and no directory passes for a package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

LATE = """
import os, sys
sys.path[:0] = [{root!r}, {place!r}]
from init.pid1.modules import look_again
if {wrapped}: look_again()
import importlib._bootstrap_external as external
look, refuse = external._path_stat, True
def stat(path):
    if refuse and path.endswith({end!r}):
        raise OSError(12, "Cannot allocate memory")
    return look(path)
external._path_stat = stat
try:
    from package.inner import VALUE
except ImportError:
    pass
refuse = False
try:
    from package.inner import VALUE
    print(VALUE)
except ImportError as error:
    print(error)
"""


def later(tmp_path: Path, end: str, *, wrapped: bool) -> str:
    (tmp_path / "package").mkdir(exist_ok=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("VALUE = 7\n")
    code = LATE.format(root=str(ROOT), place=str(tmp_path), end=end, wrapped=wrapped)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_could_not_be_looked_at_once_is_looked_at_again(tmp_path: Path) -> None:
    for end in (tmp_path.name, "package", "__init__.py"):  # the way to it, its directory, its first file
        assert later(tmp_path, end, wrapped=True) == "7", end
    assert later(tmp_path, "package", wrapped=False) != "7", "Python's own way"
