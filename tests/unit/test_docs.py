"""The documentation: every link leads somewhere, and every page can be found from the index."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
