"""Placeholder for a service whose drop-in is invalid: prints the file's error, and fails."""

from __future__ import annotations

from collections.abc import Sequence

EX_CONFIG = 78


def main(arguments: Sequence[str]) -> int:
    print("; ".join(" ".join(arguments).splitlines()))
    return EX_CONFIG
