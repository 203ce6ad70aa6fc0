"""The one error of this package: what could not be done, why, where it stands, and what to do about it."""

from __future__ import annotations

from ground.errors import Problem
from ground.errors import nearest as nearest


class ImagesError(Problem):
    """Told to the user as it is, without a traceback."""
