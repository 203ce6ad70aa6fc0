"""slurmctld may be killed at any moment of its life, the first minutes too: it starts again with the jobs it had saved.

A preload kills it before each change of its state directory in turn (every one with MINIVM_TEST_KILLS=1, else one in
`STEP`, and others with each release), in a life that begins with nothing and in one that begins with saved state.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.init_pods import IMAGES, PYTHON, ROOT, Pod, slurm_conf, world

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

STEP = 1 if os.environ.get("MINIVM_TEST_KILLS") else 14
# The first change that each release is killed at.
FIRST = {"24.11": 0, "26.05": STEP // 2}
HERE = Path(__file__).parents[1]
# Jobs need a node that fits them, and no node that answers.
NODE = "NodeName=n1 NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=DOWN"


@pytest.fixture(scope="module", params=FIRST)
def controller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, int]]:
    """Run a controller with accounting whose slurmctld has the preload and restarts at once, however often it dies."""
    directory = tmp_path_factory.mktemp("killed")
    preload = directory / "killed_at.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", preload, HERE / "killed_at.c"], check=True)
    service = yaml.safe_load((ROOT / "init/services/slurmctld.yaml").read_text())
    service["environment"] = {"LD_PRELOAD": "/killed_at.so"}
    service["restart"] |= {"limit": 100000, "delay": "100ms", "max-delay": "100ms"}
    tag = find_newest_here(DockerEngine().client, IMAGES, slurm=request.param, variant="debian")["controller"]
    with world(directory, f"killed{request.param}") as made:
        made.configure({"slurm.conf": slurm_conf(NODE)})
        drop_in = made.mounts / "config/services.d/slurmctld.yaml"
        drop_in.parent.mkdir()
        drop_in.write_text(yaml.safe_dump(service))
        mounts = [
            Mount("/killed_at.so", str(preload), type="bind", read_only=True),
            Mount("/killed_lives.py", str(HERE / "killed_lives.py"), type="bind", read_only=True),
        ]
        env = {"MINIVM_BACKUP_EVERY": "0"}  # with a copy of one life, the next would not start without its jobs
        pod = made.pod(
            "controller", "slurm-controller", image=f"{IMAGES}/controller:{tag}", extra_mounts=mounts, env=env
        ).wait_ready()
        pod.add_user()
        yield pod, FIRST[request.param]


@pytest.mark.parametrize("kind", ["fresh", "grown"])
def test_a_slurmctld_that_is_killed_at_any_change_of_its_state_comes_back(
    controller: tuple[Pod, int], kind: str
) -> None:
    pod, first = controller
    said = pod.run(PYTHON, "/killed_lives.py", str(first), str(STEP), kind)
    lives: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    killed = [life for life in lives if life["killed"]]
    print(f"{kind}: {len(killed)} kills, {sum(life['saved'] for life in killed)} after the job was saved")
    assert len(killed) > 60 // STEP - 1 and not lives[-1]["killed"], lives
    assert [life for life in lives if not (life["ready"] and life["kept"])] == []
