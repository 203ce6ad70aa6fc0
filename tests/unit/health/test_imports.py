"""Imports of a tree's checks: each tree has its own modules, and Python's import path stays unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from health.checks.load import load_checks

CHECK = """
from health.api import Check, Class, ok
from site_words import WORD
import parsers.words

CHECK = Check(name="one", about="", class_=Class.NODE, period_s=60, sources=(), thresholds="")

def parse(inputs):
    import late.words
    return (WORD, parsers.words.WORD, late.words.WORD)

def judge(measured, context):
    yield ok(" ".join(measured))
"""


def tree(root: Path, word: str) -> Path:
    for name in ("health.d", "lib/parsers", "lib/late"):
        (root / name).mkdir(parents=True)
    (root / "health.d/one.py").write_text(CHECK)
    (root / "lib/parsers/__init__.py").touch()
    for name in ("site_words", "parsers/words", "late/words"):
        (root / f"lib/{name}.py").write_text(f"WORD = {word!r}\n")
    return root


def parsed(root: Path) -> Any:
    loaded = load_checks(root)
    assert not loaded.broken
    return loaded.checks["one"].parse({})  # type: ignore[arg-type]  # it reads nothing


def test_each_tree_has_its_own_modules_also_those_that_are_imported_late(tmp_path: Path) -> None:
    first, second = tree(tmp_path / "a", "one"), tree(tmp_path / "b", "two")
    assert parsed(first) == ("one",) * 3
    assert parsed(second) == ("two",) * 3
    assert parsed(first) == ("one",) * 3


def test_python_s_own_path_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading trees leaves sys.path as it is, including an unrelated directory called lib."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "other/lib")])
    before = list(sys.path)
    parsed(tree(tmp_path / "a", "one"))
    parsed(tree(tmp_path / "b", "two"))
    assert sys.path == before


def test_a_tree_s_module_does_not_hide_what_python_has_as_a_directory(tmp_path: Path) -> None:
    """A data directory in a tree's lib is not a package, and does not hide Python's package of the same name."""
    root = tree(tmp_path / "a", "one")
    (root / "lib/xmlrpc").mkdir()
    (root / "lib/site_words.py").write_text("import xmlrpc.client\nWORD = 'one'\n")
    assert parsed(root) == ("one",) * 3
