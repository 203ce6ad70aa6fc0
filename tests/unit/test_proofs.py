"""Pages that name a test for each guarantee and each defence name existing tests, so a rename leaves none unproven."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
NAMED = re.compile(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize(
    ("page", "least"),
    [("proofs.md", 40), ("hostile-inputs.md", 3), ("tried-on-kubernetes.md", 0), ("../security.md", 20)],
)
def test_every_named_proof_exists(page: str, least: int) -> None:
    named = NAMED.findall((REFERENCE / page).read_text())
    assert len(named) > least
    defined: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        found = re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
        # tests/unit/init/test_x.py is named init/test_x.py, whatever kind of test it is.
        defined.setdefault("/".join(path.parts[-2:]), set()).update(found)
        defined.setdefault(path.name, set()).update(found)
    missing = [f"{file}::{name}" for file, name in named if name not in defined.get(file, set())]
    assert not missing, "\n".join(missing)


def test_every_kubernetes_test_that_a_page_names_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)`", (REFERENCE / "tried-on-kubernetes.md").read_text())
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / "tests" / "kubernetes" / name).is_file()]


def test_every_hostile_input_has_writer_defence_and_test() -> None:
    rows = [line for line in (REFERENCE / "hostile-inputs.md").read_text().splitlines() if line.startswith("|")]
    heads = ("| input |", "|---")
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), f"wanted input | writer | defence | test: {row}"
        if not row.startswith(heads):
            assert NAMED.search(cells[3]), f"names no test: {row}"


def test_every_line_of_the_threat_model_s_tables_names_its_test() -> None:
    """A row that only says what an actor can do needs none."""
    rows = [line for line in (REFERENCE / "../security.md").read_text().splitlines() if line.startswith("|")]
    tests, shown = False, 0
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith(("| party", "| can")):
            tests, cannot = cells[-1] == "test", cells.index("cannot") if "cannot" in cells else 0
        elif tests and not row.startswith("|---") and cells[cannot]:
            shown += 1
            assert NAMED.search(cells[-1]), f"names no test: {row}"
    assert shown > 20
