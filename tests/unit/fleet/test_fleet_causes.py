"""The table of drain causes is complete: each kind has its setting, its text, its place in the code and its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fleet.decide.causes import KINDS, TEXTS, CauseKind, cause
from fleet.policy import POLICY_KEYS
from fleet.world import slurm

ROOT = Path(__file__).resolve().parents[3]
# Kinds without a setting of the policy: a person's request to a pod or a machine.
REQUESTED = {"leave", "goal"}
TABLE = (ROOT / "docs/fleet.md").read_text().split("## What it does")[1].split("\n## ")[0]


def literals() -> set[str]:
    """Return the string literals of the modules that decide, without the table."""
    found: list[object] = []
    for path in (ROOT / "fleet/decide").rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, ast.Assign):
                found += [node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)]
    return {literal for literal in found if isinstance(literal, str)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_complete(kind: CauseKind) -> None:
    without_setting = kind.of_pool or kind.name in REQUESTED
    assert without_setting if not kind.setting else kind.setting in POLICY_KEYS, (
        "write its setting into fleet/policy.py"
    )
    assert f"`{kind.name}`" in TABLE, "name it in the table of docs/fleet.md"
    assert kind.name in literals(), "no module of fleet/decide finds it"
    reason = slurm.drain_reason(cause(kind.name, *(7 for _ in re.findall(r"{.*?}", kind.text))))
    assert slurm.causes_in(reason) == {kind.name}, "Slurm's reason does not lead back to it"


def test_a_name_stands_once() -> None:
    assert len(TEXTS) == len(KINDS)


def test_only_requests_and_machines_signs_have_their_ways() -> None:
    assert not [kind.name for kind in KINDS if kind.on_fast_path and (kind.limited or kind.of_pool)]
    assert all(kind.evicts for kind in KINDS if kind.of_pool)
