"""The module map and the walks of docs/architecture.md.

The map names every folder with its summary, and the walks name existing files. `make map` runs this
file: it writes the map and prints each module with the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.floors import FLOORS, PRODUCT

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- map: begin -->\n", "<!-- map: end -->\n"
# Upper limit for the words of all walks together: five minutes of reading.
MOST_WORDS = 1200


def first_sentence(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s+(?=[A-Z$])", paragraph, maxsplit=1)[0]


def rooms(package: Path) -> Iterator[Path]:
    """Yield the package's own folder, then its folders from the bottom up, each followed by its subfolders."""
    for names in FLOORS[package.name]:
        for room in sorted(package / name for name in names):
            yield room
            if room != package:
                yield from sorted(path.parent for path in room.rglob("*/__init__.py"))


def modules(room: Path) -> list[Path]:
    return [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]


def folder_map() -> str:
    """Name each folder with its summary, one folder a line."""
    lines = []
    for package in PRODUCT:
        for room in rooms(ROOT / package):
            lines.append(f"- `{room.relative_to(ROOT)}/`: {first_sentence(room / '__init__.py')}")
        lines.append("")
    return "\n".join(lines)


def module_map() -> str:
    """Name each module with the first sentence of its docstring, one module a line."""
    paths = [path for package in PRODUCT for room in rooms(ROOT / package) for path in modules(room)]
    return "\n".join(f"{path.relative_to(ROOT)}: {first_sentence(path)}" for path in paths)


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_map_is_what_the_modules_say() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.splitlines() == folder_map().splitlines(), "`make map` writes it anew"


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if not first_sentence(path)
    ]
    assert not silent, f"no docstring: {silent}"


def test_the_walks_pass_through_files_that_are_there() -> None:
    text = section("Five walks")
    named = re.findall(r"`([\w/]+\.(?:py|yaml|tpl))`", section("Where to begin") + text)
    assert text.count("\n**") >= 3 and len(named) > 50
    lost = [name for name in named if not (ROOT / name).is_file()]
    assert not lost, f"no such file: {lost}"
    assert len(text.split()) < MOST_WORDS, "the walks are to be read in five minutes"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + folder_map() + END + rest.partition(END)[2])
    print(module_map())
