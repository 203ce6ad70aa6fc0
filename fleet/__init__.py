"""Fleet: the operator that keeps Kubernetes and Slurm consistent."""

from __future__ import annotations

from ground.errors import Problem


class FleetError(Problem):
    """A failure outside the fleet, of a server or of a file that people write; the next pass tries again."""
