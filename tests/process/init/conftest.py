"""Fixtures for the tests of a PID 1 in a scratch pod."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.init_world import World, world


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB and 100 inodes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=100", "disk", tmp_path], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
