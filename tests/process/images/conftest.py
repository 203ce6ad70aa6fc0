"""A registry of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from images.ship.registry import Registry
from tests.container.registryd import PUSHER, Registryd


@pytest.fixture
def registryd(tmp_path: Path) -> Iterator[Registryd]:
    daemon = Registryd(tmp_path / "registry")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def registry(registryd: Registryd) -> Registry:
    return Registry(registryd.place, "worker", PUSHER)
