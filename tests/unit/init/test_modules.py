"""Imports in PID 1.

An image's byte code is used as it is, and a checkout's source is compared first. A failed import is tried again later,
and a plain directory never counts as a package.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
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
    for end in (tmp_path.name, "package", "__init__.py"):  # its parent, its directory, its first file
        assert later(tmp_path, end, wrapped=True) == "7", end
    assert later(tmp_path, "package", wrapped=False) != "7", "Python's own way"


HURRIED = """
import sys
sys.path.append({place!r})
from init.pid1.modules import hurry
hurry()
import importlib._bootstrap_external as external
asked, look = [], external.FileFinder.find_spec
external.FileFinder.find_spec = lambda self, name, target=None: asked.append(name) or look(self, name, target)
from init.pid1 import loop, start
import init.places
print([name for name in asked if name.startswith("init.")])
print(init.places.PLAN)
print(loop.__file__, loop.__package__, loop.__spec__.cached)
print(init.plan.__file__, init.plan.__path__)
try:
    import init.absent
except ImportError as error:
    print(error)
start.fails()
"""


def hurried(tmp_path: Path, mode: py_compile.PycInvalidationMode) -> tuple[list[str], str]:
    """Run the package with compiled byte code, one module changed before the compilation and one after it."""
    package = tmp_path / "init"
    shutil.copytree(ROOT / "init", package, ignore=shutil.ignore_patterns("__pycache__", "services"))
    with (package / "pid1/start.py").open("a") as stream:
        stream.write("\n\ndef fails() -> None:\n    raise RuntimeError\n")
    compileall.compile_dir(package, quiet=1, invalidation_mode=mode)
    with (package / "places.py").open("a") as stream:
        stream.write("PLAN = 'the newer source'\n")
    command = [sys.executable, "-I", "-S", "-c", HURRIED.format(place=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines(), done.stderr


def test_an_images_modules_are_loaded_without_a_search(tmp_path: Path) -> None:
    printed, said = hurried(tmp_path, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    asked, plan, module, package, absent = printed
    assert asked == "[]"
    assert plan == "/etc/minivm/plan.json"
    cached = tmp_path / f"init/pid1/__pycache__/loop.{sys.implementation.cache_tag}.pyc"
    assert module == f"{tmp_path}/init/pid1/loop.py init.pid1 {cached}"
    assert package == f"{tmp_path}/init/plan/__init__.py ['{tmp_path}/init/plan']"
    assert absent == "No module named 'init.absent'"
    line = len((tmp_path / "init/pid1/start.py").read_text().splitlines())
    assert f'File "{tmp_path}/init/pid1/start.py", line {line}, in fails\n    raise RuntimeError' in said


def test_in_a_checkout_the_source_counts(tmp_path: Path) -> None:
    for mode in (py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.CHECKED_HASH):
        printed, _ = hurried(tmp_path / mode.name, mode)
        assert "'init.pid1.loop'" in printed[0]
        assert printed[1] == "the newer source"
