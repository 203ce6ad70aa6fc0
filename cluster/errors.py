"""The one way in which this package fails: cannot X: why."""

from __future__ import annotations


class ClusterError(Exception):
    """A cluster that cannot be made, and what to do; the command line prints it and nothing else."""

    def __init__(self, cannot: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"cannot {cannot}: {why}" + (f"\nhint: {hint}" if hint else ""))
        self.hint = hint
