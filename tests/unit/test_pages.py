"""Which fenced commands of the pages are run by tests/cluster/test_cluster_g_pages.py, and which are not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.pages import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
# page: fences that run, and how many of the others need what.
RUN = {
    "tutorial.md": (8, Counter[str]()),
    "how-to/operate-a-pod.md": (2, Counter[str]()),
    "how-to/add-a-user.md": (1, Counter({"a name": 1})),
}


@pytest.mark.parametrize("page", RUN)
def test_every_fence_of_the_page_runs_or_says_why_not(page: str) -> None:
    found = blocks(DOCS / page)
    runs, needs = RUN[page]
    assert sum(block.runs for block in found) == runs
    assert Counter(block.needs for block in found if block.needs) == needs


def test_marks_are_read_and_wrong_ones_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- as alice -->\n```\nsinfo\n```\n\n```\nmake up\n```\n<!-- shown -->\n```\n1 s\n```\n"
        "<!-- may fail: make status -->\n```\nmake status\nmake down\n```\n"
        "<!-- needs hardware: a GPU -->\n```\nnvidia-smi\n```\n"
    )
    found = blocks(page)
    assert [(block.line, block.user, block.runs, block.needs) for block in found] == [
        (3, "alice", True, ""), (7, "", True, ""), (11, "", False, ""), (15, "", True, ""), (20, "", False, "hardware")
    ]  # fmt: skip
    assert found[3].script == "set -e\nmake status || :\nmake down\n"
    for mark in ("as", "needs luck: no", "may fail: make up", "needs kubernetes"):
        page.write_text(f"<!-- {mark} -->\n```\nmake status\n```\n")
        with pytest.raises(ValueError, match="is no mark"):
            blocks(page)
    page.write_text("```\nopen\n")
    with pytest.raises(ValueError, match="not closed"):
        blocks(page)
