"""Settings and servers for a whole fleet in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.policy import FleetSettings
from tests.support.slurm_rest import Rest
from tests.support.watch_server import Server

SLURM = {"name": "w0", "state": ["IDLE"], "reason": "", "comment": "", "alloc_cpus": 0}
POD: dict[str, Any] = {
    "metadata": {
        "name": "w0",
        "uid": "u",
        "resourceVersion": "1",
        "labels": {"app.kubernetes.io/component": "worker"},
    },
    "spec": {"nodeName": "n0"},
    "status": {"conditions": [{"type": "minivm.io/SlurmState", "status": "True", "reason": "TakesJobs"}]},
}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.pods = [POD]
    yield made
    made.ended.set()
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def settings(rest: Rest, tmp_path: Path) -> FleetSettings:
    address = f"127.0.0.1:{rest.server.server_port}"
    return FleetSettings("default", "slurm", address, rest.client.key, tmp_path / "policy.json")
