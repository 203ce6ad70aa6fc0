"""One worker's clock is 10 s ahead, then 10 s behind: the page names the task that failed first, or says it cannot."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

WORKERS = ("slurm-worker-0", "slurm-worker-1")
# Debian's faketime.
LIBRARY = "*/faketime/libfaketimeMT.so.1"
# The second failure comes by itself, after the first one and before Slurm ends the step for it.
FAILS = "srun -N2 -n2 --wait=60 bash -c 'if [ $SLURMD_NODENAME = {first} ]; then {end}; else sleep 3; exit 9; fi'"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with small_cluster(DockerEngine().client, f"{NAME}-clocks", tmp_path_factory.mktemp("clocks"), {}, 2) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


def set_clock(world: World, pod: str, seconds: int) -> None:
    """Start the pod's processes again, PID 1 too, with a clock that differs from this machine's."""
    running = world.running(pod)
    library = next(Path("/usr/lib").glob(LIBRARY))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        for name, data in {
            "opt/faketime.so": library.read_bytes(),
            "etc/ld.so.preload": b"/opt/faketime.so\n",
            "etc/faketimerc": f"{seconds:+d}s\n".encode(),
        }.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            packed.addfile(member, io.BytesIO(data))
    container = DockerEngine().client.containers.get(running.container)
    container.put_archive("/", archive.getvalue())
    container.restart(timeout=60)
    world.wait_ready()
    world.wait_idle()
    here = float(world.run("slurm-login-0", "date", "+%s"))
    assert abs(float(world.run(pod, "date", "+%s")) - here - seconds) < 5, "its clock differs"


@pytest.mark.parametrize("seconds", [10, -10])
def test_the_first_failure_is_named_though_a_worker_s_clock_differs(world: World, seconds: int) -> None:
    set_clock(world, WORKERS[1], seconds)
    ann = Researcher(world, "alice")
    for place, end, words in ((0, "exit 7", "exit code 7"), (1, "exit 7", "exit code 7"), (1, "kill -9 $$", "SIGKILL")):
        first = WORKERS[place]
        job = ann.submit("-N2", "-o", "/dev/null", script=FAILS.format(first=first, end=end))
        ann.wait_for(job, "FAILED")

        def page() -> str:
            return ann(f"minivm job {job}")  # noqa: B023

        headline = rf"First failed task \d on {first}, in step {job}\.0: .*{words}"
        until(lambda: re.search(headline, page()), "the page names the first failure", seen=page)  # noqa: B023
        times = [event["at"] for event in json.loads(ann(f"minivm job {job} --json"))["timeline"]]
        assert times == sorted(times) and "after -" not in page()
