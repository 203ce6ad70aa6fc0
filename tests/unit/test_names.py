"""Names: a class names one idea in the whole tree, and a module gives each name one meaning.

A reader who meets `Snapshot` should not have to ask which one. The number of names that are defined more than once only
falls: lower the ceiling in the commit that removes one.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.floors import PRODUCT

ROOT = Path(__file__).resolve().parents[2]
PLACES = (*PRODUCT, "bench", "scripts")
# Names that are defined more than once today. The goal is at most 10.
CEILING = 1


def definitions() -> dict[str, list[str]]:
    places = defaultdict(list)
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def test_few_class_names_are_defined_more_than_once() -> None:
    twice = {name: places for name, places in definitions().items() if len(places) > 1}
    shown = "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items()))
    assert len(twice) <= CEILING, f"name each class for what it alone is:\n{shown}"


def bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds; `import a.b` binds no name of its own."""
    match statement:
        case ast.Assign(targets=targets):
            nodes = (node for target in targets for node in ast.walk(target))
            yield from (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ImportFrom(names=names):
            yield from (each.asname or each.name for each in names)
        case ast.Import(names=names):
            yield from (each.asname or each.name for each in names if each.asname or "." not in each.name)


def twice_bound(text: str) -> list[str]:
    counts = Counter(name for statement in ast.parse(text).body for name in bound(statement))
    return sorted(name for name, count in counts.items() if count > 1)


def test_no_module_binds_a_name_twice() -> None:
    """The later value would count for the earlier code too, and neither linter nor type checker tells."""
    found = {
        str(path.relative_to(ROOT)): names
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if (names := twice_bound(path.read_text()))
    }
    assert not found, "give each meaning a name of its own"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("KEPT = 5\ndef prune(): ...\nKEPT = 3\n", ["KEPT"]),
        ("from a import DIGEST\nDIGEST: int = 1\n", ["DIGEST"]),
        ("def main(): ...\nasync def main(): ...\n", ["main"]),
        ("import urllib.error\nimport urllib.request\nA = 1\n", []),
    ],
)
def test_a_second_binding_is_seen(text: str, names: list[str]) -> None:
    assert twice_bound(text) == names
