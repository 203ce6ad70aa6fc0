"""Plans of the roles, compiled from the tree."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from images.definition.load import load, read_yaml
from images.definition.spec import BuildChoice, Definition, SlurmSource
from images.make.content import compile_role
from init.plan.compile import Plan, plan_from_json

ROOT = Path(__file__).resolve().parents[2]


@cache
def definition() -> Definition:
    return load(ROOT)


@cache
def plan_of(role: str) -> Plan:
    """Return the plan as the image build bakes it."""
    choice = BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
    return plan_from_json(compile_role(definition().roles[role], definition(), choice, ROOT, read_yaml), role)
