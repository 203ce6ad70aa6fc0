"""What the tests of a PID 1 in a scratch pod share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.init_world import World, world


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made
