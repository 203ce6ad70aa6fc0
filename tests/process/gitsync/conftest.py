"""Fixtures for the tests of gitsync with a real git."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.gitsync_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)
