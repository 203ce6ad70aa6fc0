"""The one way in which the lab fails: cannot X: why."""

from __future__ import annotations


class LabError(Exception):
    """The Kubernetes of the tests cannot be made, or does not do what was asked; the command line prints it."""

    def __init__(self, cannot: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"cannot {cannot}: {why}" + (f"\nhint: {hint}" if hint else ""))
