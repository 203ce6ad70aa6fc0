"""Pods of another architecture than this machine's: each program of theirs is run by qemu.

Their images are those that were built for it: a controller by `make test`, the rest by `make test-emulated`; without
them there is nothing to start.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from images import architectures
from tests.container.init_pods import IMAGES, Pod, World, slurm_conf, world
from tests.waiting import until

OTHER = next(arch for arch in architectures.KNOWN if arch != architectures.read_own())
MACHINE = architectures.KNOWN[OTHER].machine
# A busy machine, and every program takes several times as long.
PATIENCE = 600.0

pytestmark = [
    pytest.mark.docker,
    pytest.mark.cluster,
    pytest.mark.timeout(3 * PATIENCE),
    pytest.mark.skipif(bool(architectures.explain_refusal(OTHER)), reason=f"{architectures.explain_refusal(OTHER)}"),
]


def image(made: World, role: str) -> str:
    name = f"{IMAGES}/{role}:latest-{OTHER}"
    if not made.client.images.list(name):
        pytest.skip(f"no image {name}: `make images ARCH={OTHER} ROLES={role}` builds it")
    return name


def pod(made: World, role: str, host: str) -> Pod:
    found = made.pod(role, host, image=image(made, role), env=architectures.SETTINGS[OTHER])
    assert found.container.image.attrs["Architecture"] == OTHER
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("emulated"), "emulated") as made:
        made.configure({"slurm.conf": slurm_conf("MessageTimeout=60")})
        yield made


@pytest.fixture(scope="module")
def controller(emulated: World) -> Pod:
    return pod(emulated, "controller", "slurm-controller").wait_ready(PATIENCE)


def test_a_controller_comes_up_whole(controller: Pod) -> None:
    assert controller.run("uname", "-m").strip() == MACHINE
    views = {view["name"]: view for view in controller.status()["services"]}
    for name in ("munged", "mariadb", "slurmdbd", "slurmctld"):
        assert views[name]["pid"] and views[name]["failures"] == 0, name
    assert "is UP" in controller.run("scontrol", "ping")


def test_a_job_runs_on_two_nodes(emulated: World, controller: Pod) -> None:
    workers = [pod(emulated, "worker", name) for name in ("w1", "w2")]
    for worker in workers:
        worker.wait_ready(PATIENCE)
    for one in (controller, *workers):
        one.add_user()
    output = controller.run("srun", "-N2", "--chdir=/tmp", "sh", "-c", "echo $(hostname) $(uname -m)", user="demo")
    assert sorted(output.splitlines()) == [f"w1 {MACHINE}", f"w2 {MACHINE}"]
    job = controller.run("sbatch", "--parsable", "-N2", "--chdir=/tmp", "--wrap", "srun hostname", user="demo").strip()
    until(
        lambda: "COMPLETED" in controller.run("sacct", "-nX", "-j", job, "--format", "State%20"),
        "it is accounted as completed",
        within=PATIENCE,
        seen=lambda: controller.run("scontrol", "show", "job", job, check=False),
    )
