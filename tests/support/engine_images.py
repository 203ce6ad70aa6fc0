"""Images of an engine that other runs use too: one that is listed may be gone at the next question."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import docker  # type: ignore[import-untyped]  # it carries no types


def if_there(ask: Callable[[str], Any], image: str) -> Any:
    """Return the engine's answer about an image, or {} if another run has removed it meanwhile."""
    with contextlib.suppress(docker.errors.NotFound):
        return ask(image)
    return {}
