"""The order in which the tests of a folder run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def sort(items: list[pytest.Item], folder: Path, order: Sequence[str]) -> None:
    """Sort in place by the file's name; tests of other folders keep their places."""
    places = [place for place, item in enumerate(items) if item.path.parent == folder]
    ordered = sorted((items[place] for place in places), key=lambda item: order.index(item.path.stem))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
