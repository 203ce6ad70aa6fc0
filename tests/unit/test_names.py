"""Names of classes: each names one idea in the whole tree.

A reader who meets `Snapshot` should not have to ask which one. The number of names that are defined more than once only
falls: lower the ceiling in the commit that removes one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

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
