"""The one way in which this package fails: cannot X: why."""

from __future__ import annotations

from ground.errors import Problem


class FleetError(Problem):
    """Something that another machine or person must mend; the next pass tries again."""
