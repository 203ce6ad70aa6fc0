"""The error of this package: what failed, why, where, and what to do about it."""

from __future__ import annotations

from ground.errors import Problem
from ground.errors import nearest as nearest


class ImagesError(Problem):
    """An error that the command line shows to the user without a traceback."""
