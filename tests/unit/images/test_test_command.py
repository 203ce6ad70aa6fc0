"""`build.py test` runs the container tests of the named roles."""

from __future__ import annotations

from pathlib import Path

from images.cli.check import list_container_tests

ROOT = Path(__file__).resolve().parents[3]


def test_it_finds_the_tests_that_are_there() -> None:
    files = list_container_tests(ROOT, ["controller", "login", "worker", "demo"])
    assert [path.name for path in files] == ["test_common.py", "test_controller.py", "test_login.py", "test_worker.py"]
    assert all(path.is_file() for path in files)
