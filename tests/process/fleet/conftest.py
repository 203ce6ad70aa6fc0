"""A slurmrestd of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_rest import Rest


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Rest]:
    made = Rest(tmp_path / "key")
    yield made
    made.server.shutdown()
    made.server.server_close()
