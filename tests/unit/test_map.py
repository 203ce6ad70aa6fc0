"""The module map and the walks of docs/architecture.md.

The map names every module once, with the module's own summary, and the walks name existing files. `make map` runs this
file and writes the map.
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


def summary(path: Path) -> str:
    """Return the first clause of the first sentence, if it has some words of its own, without its article."""
    short = first_sentence(path)
    for separator, least in (("[:;] | \\(", 2), (", ", 3)):
        head = re.split(separator, short, maxsplit=1)[0]
        short = head if len(head.split()) >= least else short
    return re.sub(r"^(?:The|An?) (\w)", lambda start: start[1].upper(), short.removesuffix("."))


def rooms(package: Path) -> Iterator[Path]:
    """Yield the package's own folder, then its folders from the bottom up, each followed by its subfolders."""
    for names in FLOORS[package.name]:
        for room in sorted(package / name for name in names):
            yield room
            if room != package:
                yield from sorted(path.parent for path in room.rglob("*/__init__.py"))


def module_map() -> str:
    lines = []
    for package in PRODUCT:
        for room in rooms(ROOT / package):
            name = f"`{room.relative_to(ROOT)}/`"
            about = summary(room / "__init__.py") + "."
            lines += [f"### {name}" if room.name == package else f"**{name}**", "", about, ""]
            modules = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
            lines += [f"- `{path.name}`: {summary(path)}" for path in modules]
            lines.append("")
    return "\n".join(lines)


def walks() -> str:
    return PAGE.read_text().partition("## Six walks\n")[2].partition("\n## ")[0]


def test_the_map_is_what_the_modules_say() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.splitlines() == module_map().splitlines(), "`make map` writes it anew"


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if not first_sentence(path)
    ]
    assert not silent, f"no docstring: {silent}"


def test_the_walks_pass_through_files_that_are_there() -> None:
    text = walks()
    named = re.findall(r"`([\w/]+\.(?:py|yaml))`", text)
    assert text.count("\n**") >= 3 and len(named) > 40
    lost = [name for name in named if not (ROOT / name).is_file()]
    assert not lost, f"no such file: {lost}"
    assert len(text.split()) < MOST_WORDS, "the walks are to be read in five minutes"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + module_map() + END + rest.partition(END)[2])
