"""The chart's filter for srun refuses an MPI plug-in that the image lacks, or that an upgrade is about to take away."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.conftest import IMAGES
from tests.support.rendered_chart import render

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

OLD, NEW = "24.11", "26.05"
CONF = "ClusterName=x\nSlurmctldHost=localhost\nMessageTimeout=1\nTCPTimeout=1\nPartitionName=p Nodes=ALL Default=YES\n"
CONF += "NodeName=localhost\nCliFilterPlugins=cli_filter/lua\n"
START = """
printf '%s' "$CONF" > /etc/slurm/slurm.conf
printf '%s' "$FILTER" > /etc/slurm/cli_filter.lua
cd /tmp
exec timeout 60 "$@"
"""


def filter_of(release: str) -> str:
    values = {"image": {"tags": {"controller": f"{release}.5-debian-a"}}, "accounting": {"mode": "none"}}
    documents = render(values, release="slurm", namespace="hpc")
    (text,) = [item["data"]["cli_filter.lua"] for item in documents if item["metadata"]["name"] == "slurm-config"]
    return str(text)


def said(image: str, controller: str, *command: str) -> str:
    """Run the command in the image of one release, with the filter of a cluster whose controller is of another."""
    tags = find_newest_here(DockerEngine().client, IMAGES, slurm=image, variant="debian")
    if "login" not in tags:
        pytest.skip(f"no login image of Slurm {image} under {IMAGES}")
    line = ["docker", "run", "--rm", "--network=none", "--entrypoint=/bin/bash", "-e", "CONF", "-e", "FILTER",
            f"{IMAGES}/login:{tags['login']}", "-c", START, "-", *command]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "CONF": CONF, "FILTER": filter_of(controller)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode, "there is no slurmctld"
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("image", "controller", "command", "reason"),
    [
        (OLD, OLD, ["srun", "--mpi=nosuch", "true"], "minivm: --mpi=nosuch: Slurm has no such plug-in in this image"),
        (NEW, NEW, ["srun", "--mpi=pmix", "true"], "mpirun, or by --mpi=pmi2; nothing was submitted"),
        (OLD, NEW, ["srun", "--mpi=pmix", "true"], "minivm: --mpi=pmix: this cluster is being upgraded to Slurm 26.05"),
        (
            OLD,
            NEW,
            ["env", "SLURM_MPI_TYPE=pmix", "srun", "true"],
            "minivm: --mpi=pmix: this cluster is being upgraded",
        ),
        (OLD, NEW, ["env", "SLURM_JOB_ID=1", "srun", "--mpi=pmix", "true"], "minivm: --mpi=pmix: this cluster"),
        (OLD, OLD, ["srun", "--mpi=../x; touch /tmp/x", "true"], "Slurm has no such plug-in"),
    ],
)
def test_srun_refuses_an_mpi_that_would_hang(image: str, controller: str, command: list[str], reason: str) -> None:
    assert reason in said(image, controller, *command)


PASS = [
    (OLD, OLD, ["srun", "--mpi=pmix", "true"]),
    (OLD, OLD, ["srun", "--mpi=pmix_v5", "true"]),
    (OLD, NEW, ["srun", "--mpi=pmi2", "true"]),
    (NEW, NEW, ["srun", "--mpi=none", "true"]),
    # On a node of the old release, whose own steps it serves.
    (OLD, NEW, ["env", "SLURM_JOB_ID=1", "SLURMD_NODENAME=w1", "srun", "--mpi=pmix", "true"]),
    (OLD, NEW, ["sbatch", "--wrap", "srun --mpi=pmix true"]),
]


def test_all_other_commands_pass() -> None:
    """Run them side by side: each looks for slurmctld for 20 s."""
    with ThreadPoolExecutor(len(PASS)) as pool:
        texts = list(pool.map(lambda case: said(case[0], case[1], *case[2]), PASS))
    for text in texts:
        assert "minivm: --mpi" not in text and "cli_filter" not in text, text
