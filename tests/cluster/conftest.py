"""One cluster of real pods for all tests here; each test leaves it healthy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import LocalCluster, free_port
from cluster.values import Options
from images.engine import Engine
from tests.cluster.researcher import Researcher, World

# Images of another repository than this machine's own: MINIVM_TEST_IMAGES=registry.example.org/minivm
IMAGES = os.environ.get("MINIVM_TEST_IMAGES", "minivm")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root: Path = tmp_path_factory.mktemp("cluster")
    options = Options(name="test", workers=2, repository=IMAGES, port=free_port(22300))
    cluster = LocalCluster(Engine().client, options, root=root, say=print)
    # What an earlier run that was killed has left.
    cluster.down()
    try:
        cluster.up(timeout=120)
        yield World(cluster)
    finally:
        cluster.down()


@pytest.fixture
def healthy(world: World) -> Iterator[World]:
    """Ready before the test, and ready again after it: a test that breaks something mends it."""
    world.wait_ready()
    yield world
    world.wait_ready()


@pytest.fixture
def alice(healthy: World) -> Researcher:
    return Researcher(healthy, "alice")
