"""The documentation: every link leads somewhere, and every page is reachable from the index."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


OURS = ("ground", "images", "init", "health", "gitsync", "fleet", "cluster", "scripts", "tests", "bench")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in LINK.findall(page.read_text())}


def test_every_link_leads_somewhere() -> None:
    dead = [f"{page.relative_to(ROOT)} -> {link}" for page in pages() for link in links(page) if not link.exists()]
    assert not dead, "\n".join(dead)


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        todo += [link for link in links(page) if link.suffix == ".md" and link.exists()]
    lost = [str(page.relative_to(ROOT)) for page in pages() if page not in reached]
    assert not lost, "no link leads to " + ", ".join(lost)


def test_every_module_that_a_page_names_is_there() -> None:
    """Every module that a page names as `x.py` exists, with as much of its path as the page gives."""
    there = [f"/{path.relative_to(ROOT)}" for part in OURS for path in (ROOT / part).rglob("*.py")]
    named = [(page, name) for page in pages() for name in re.findall(r"`([\w/]+\.py)`", page.read_text())]
    assert len(named) > 80
    lost = [f"{page.relative_to(ROOT)}: {name}" for page, name in named if not in_the_tree(name, there)]
    assert not lost, "\n".join(lost)


def in_the_tree(name: str, there: list[str]) -> bool:
    return (ROOT / name).is_file() or any(path.endswith(f"/{name}") for path in there)
