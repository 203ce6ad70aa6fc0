"""Images of another architecture than this machine's, where somebody has built them: a job on two nodes, by emulation.

Building them takes too long to be part of every run: `make images ARCH=arm64`, then this.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from images import architectures, emulation
from tests.container.init_pods import IMAGES, Pod, slurm_conf, world

pytestmark = [pytest.mark.docker, pytest.mark.cluster]
OTHER = next(name for name in architectures.KNOWN if name != architectures.own())
MACHINE = architectures.KNOWN[OTHER].machine


def image(role: str) -> str:
    name = f"{IMAGES}/{role}:latest-{OTHER}"
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        pytest.skip(f"no image {name}: `make images ARCH={OTHER}` builds it")
    if why := emulation.refusal(OTHER):
        pytest.skip(why)
    return name


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, list[Pod]]]:
    images = {role: image(role) for role in ("controller", "worker")}
    with world(tmp_path_factory.mktemp("other"), "other") as made:
        # A database's first start takes minutes by emulation, and is no part of what is asked here.
        made.configure({"slurm.conf": slurm_conf(accounting=False)})
        env = {"MINIVM_ACCOUNTING": "none"}
        controller = made.pod("controller", "slurm-controller", image=images["controller"], env=env)
        yield controller, [made.pod("worker", name, image=images["worker"]) for name in ("w1", "w2")]


@pytest.mark.parametrize("role", ["controller", "worker"])
def test_an_image_says_what_it_is_for(role: str) -> None:
    done = subprocess.run(["docker", "image", "inspect", image(role)], capture_output=True, check=True)
    assert json.loads(done.stdout)[0]["Architecture"] == OTHER


def test_a_job_runs_on_two_nodes_of_the_other_architecture(pods: tuple[Pod, list[Pod]]) -> None:
    controller, workers = pods
    for pod in (controller, *workers):
        pod.add_user()
    for pod in (controller, *workers):
        pod.wait_ready(600)
    assert controller.run("uname", "-m").strip() == MACHINE
    said = controller.run("srun", "-N2", "--chdir=/tmp", "sh", "-c", "echo $(hostname) $(uname -m)", user="demo")
    assert sorted(said.splitlines()) == [f"w1 {MACHINE}", f"w2 {MACHINE}"]
