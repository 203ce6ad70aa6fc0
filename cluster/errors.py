"""The one way in which this package fails: cannot X: why."""

from __future__ import annotations

from ground.errors import Problem


class ClusterError(Problem):
    """A cluster that cannot be made, and what to do; the command line prints it and nothing else."""
