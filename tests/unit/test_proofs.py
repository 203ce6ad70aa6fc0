"""docs/reference/proofs.md names tests that exist: a promise is not left without its proof by a rename."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_every_named_proof_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "reference" / "proofs.md").read_text())
    assert len(named) > 40
    defined: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        found = re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
        defined.setdefault(path.name, set()).update(found)
    missing = [f"{file}::{name}" for file, name in named if name not in defined.get(file, set())]
    assert not missing, "\n".join(missing)
