"""In the place of a service that a wrong drop-in was to change: says what is wrong with the file, and fails."""

from __future__ import annotations

from collections.abc import Sequence

EX_CONFIG = 78


def main(arguments: Sequence[str]) -> int:
    print("; ".join(" ".join(arguments).splitlines()))
    return EX_CONFIG
