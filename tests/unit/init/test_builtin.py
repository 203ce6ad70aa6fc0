"""Validation of built-in commands with the plan, before any of them runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from init.errors import ConfigError
from init.plan.service import BUILTINS, STEPS
from init.plan.spec import parse_service

ROOT = Path(__file__).resolve().parents[3]


def parsed(**mapping: Any) -> str:
    """Return the error of the check; empty for a valid service."""
    try:
        parse_service("a", {"kind": "oneshot"} | mapping, "a.yaml")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"command": ["builtin:prepare", "munge-key", "stale"]}, ""),
        ({"command": ["builtin:fresh-node"], "environment": {"A": "b"}, "umask": "0077"}, ""),
        ({"command": ["/bin/true"], "prepare": [["/bin/true"], ["builtin:prepare", "sssd"]], "user": "nobody"}, ""),
        ({"command": ["builtin:prepair", "sssd"]}, "did you mean prepare?"),
        ({"command": ["builtin:prepare", "mungekey"]}, "did you mean munge-key?"),
        ({"command": ["/bin/true"], "prepare": [["builtin:prepare", "mungekey"]]}, "prepare: cannot read service a"),
        ({"command": ["builtin:prepare"]}, "no step"),
        ({"command": ["builtin:fresh-node", "now"]}, "takes no arguments"),
        ({"command": ["builtin:fresh-node"], "kind": "longrun"}, "cannot be a longrun"),
        ({"command": ["builtin:fresh-node"], "kind": "periodic", "every": 1}, "cannot be a periodic"),
        ({"command": ["builtin:fresh-node"], "user": "slurm"}, "a built-in runs with PID 1's rights"),
        ({"command": ["builtin:fresh-node"], "capabilities": []}, "a built-in runs with PID 1's rights"),
        ({"command": ["/bin/true"], "prepare": [["rm", "-f", "/x"]]}, "'rm' is not an absolute path"),
    ],
)
def test_the_check_of_a_built_in(mapping: dict[str, Any], words: str) -> None:
    said = parsed(**mapping)
    assert words in said if words else not said


def test_every_built_in_and_every_step_is_there() -> None:
    for module, function in BUILTINS.values():
        assert callable(getattr(importlib.import_module(module), function))
    for module, function in STEPS.values():
        assert callable(getattr(importlib.import_module(f"init.prepare.{module}"), function))


def test_the_projects_own_short_steps_are_built_in() -> None:
    """Short steps of the project are built-ins: a Python process of its own for each would slow down the boot."""
    programs = {path.stem: path.read_text() for path in (ROOT / "init/services").glob("*.yaml")}
    for module, _ in BUILTINS.values():
        name = module.removesuffix(".__main__")
        assert not [stem for stem, text in programs.items() if f"-m, {name}" in text]
