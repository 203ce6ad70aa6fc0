"""Container images: the definition (data in layers/ and roles/) and the engine that builds them."""

from __future__ import annotations

from ground.errors import Problem


class ImagesError(Problem):
    """An error that the command line shows to the user without a traceback."""
