"""Layout and style of the tests: one folder per package, an explicit order, and no ambiguous assertion."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.cluster import conftest as cluster
from tests.kubernetes import conftest as kubernetes

TESTS = Path(__file__).resolve().parents[1]
PACKAGES = {"ground", "init", "health", "gitsync", "images", "cluster", "fleet"}


def test_tests_of_a_package_lie_in_its_folder() -> None:
    for kind in ("unit", "process", "container"):
        folders = {path.parent for path in (TESTS / kind).rglob("test_*.py")} - {TESTS / "unit"}
        assert {folder.relative_to(TESTS / kind).as_posix() for folder in folders} <= PACKAGES


@pytest.mark.parametrize(("folder", "order"), [("cluster", cluster.ORDER), ("kubernetes", kubernetes.ORDER)])
def test_tests_that_share_something_have_their_order(folder: str, order: tuple[str, ...]) -> None:
    assert sorted(order) == sorted(path.stem for path in (TESTS / folder).glob("test_*.py"))
    assert not [name for name in order if re.match(rf"test_({folder}_)?[a-z0-9]_", name)], "an order hidden in a name"


def has_or(test: ast.expr) -> bool:
    return isinstance(test, ast.BoolOp) and (isinstance(test.op, ast.Or) or any(map(has_or, test.values)))


def test_no_assertion_leaves_open_which_of_two_it_means() -> None:
    """No assertion has the form `assert a or b`, which may pass for years by the operand that was not intended."""
    vague = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and has_or(node.test)
    ]
    assert not vague, "\n".join(vague)


def test_no_test_module_imports_another() -> None:
    """Helpers live in tests/support: a test that another test imports cannot be read, moved or removed by itself."""
    imported = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in modules_of(node)
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    ]
    assert not imported, "\n".join(imported)


def modules_of(node: ast.AST) -> list[str]:
    """Return every name that an import may bind a module by."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


OURS = rf"(?:{'|'.join(sorted(PACKAGES))})"
OWN_IMPORT = re.compile(rf"^\s*(?:from ({OURS}(?:\.\w+)*) import ([\w, ]+)|import ({OURS}(?:\.\w+)+))", re.MULTILINE)


def absent_imports(text: str) -> list[str]:
    """Return what a program kept as text imports from our packages and does not get."""
    absent = []
    for module, names, alone in OWN_IMPORT.findall(text):
        try:
            imported = importlib.import_module(module or alone)
        except ModuleNotFoundError:
            absent.append(module or alone)
            continue
        for name in (part.split()[0] for part in names.split(",") if part.split()):
            if not hasattr(imported, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                absent.append(f"{module}.{name}")
    return absent


def test_programs_kept_as_text_import_what_exists() -> None:
    """A module that moves moves in these programs, too: no type checker reads them."""
    broken = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in absent_imports(node.value)
        if name != "init.absent"  # absent on purpose
    ]
    assert not broken, "\n".join(broken)
