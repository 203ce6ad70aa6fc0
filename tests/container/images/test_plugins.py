"""Slurm's plug-ins in each packaged release, by the word of Slurm's own loader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.conftest import IMAGES, docker
from tests.slurm import release_of

pytestmark = [pytest.mark.docker]

RELEASES = ("24.11", "26.05")
PROGRAM = Path(__file__).with_name("plugrack.py").read_text()
# What is written here and in the chart, and what a GPU cluster is bought for, in every release.
EVERYWHERE = {
    "accounting_storage/slurmdbd", "auth/jwt", "auth/munge", "auth/slurm", "cli_filter/lua", "gres/gpu", "mpi/pmi2",
    "openapi/slurmctld", "openapi/slurmdbd", "priority/multifactor", "proctrack/cgroup", "proctrack/linuxproc",
    "rest_auth/jwt", "select/cons_tres", "switch/nvidia_imex", "topology/block", "topology/tree",
}  # fmt: skip
OWN = {
    "24.11": {"job_container/tmpfs", "topology/3d_torus"},
    "26.05": {"namespace/tmpfs", "topology/flat", "topology/ring", "topology/torus3d"},
}
# These are parts of one daemon, and use what is in it.
OF_A_DAEMON = re.compile(r"(burst_buffer|cgroup|gpu|job_submit|mcs|sched|task)_\w+\.so")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("role", ["controller", "worker"])
def test_slurm_takes_every_plugin_that_lies_there(role: str, release: str) -> None:
    image = f"{IMAGES}/{role}:{find_newest_here(DockerEngine().client, IMAGES, slurm=release, variant='debian')[role]}"
    taken, left = json.loads(
        docker("run", "--rm", "--network=none", "--entrypoint=python3", image, "-I", "-c", PROGRAM)
    )
    kinds, facts = set(taken.values()), release_of(image)
    print(f"{image}: {' '.join(sorted(kinds))}; of a daemon: {' '.join(left)}")
    assert EVERYWHERE | OWN[release] <= kinds
    assert f"data_parser/v0.0.{facts.protocol}" in kinds
    assert {facts.metrics} - {""} <= kinds
    assert {kind.partition("_")[0] for kind in kinds if kind.startswith(("mpi/pmi2", "mpi/pmix"))} == {
        f"mpi/{name}" for name in facts.mpi
    }
    if role == "controller":
        assert "accounting_storage/as_mysql" in kinds
    else:
        assert f"gpu_{facts.gpu}.so" in {*taken, *left}
    for name, symbol in left.items():
        assert OF_A_DAEMON.fullmatch(name), (name, symbol)
        assert re.fullmatch(r"\w+", symbol), (name, symbol)
