"""Clocks that differ by 10 s, and kills: `minivm job` names what happened first, or says that it cannot."""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    values = {"slurm": {"config": {"SlurmdTimeout": "60"}}}
    with small_cluster(
        DockerEngine().client, f"{NAME}-clocks", tmp_path_factory.mktemp("clocks"), values, 2
    ) as cluster:
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


@pytest.mark.parametrize("seconds", [10, -10])
def test_a_killed_node_is_named_though_its_clock_differs(world: World, seconds: int) -> None:
    set_clock(world, WORKERS[1], seconds)
    ann = Researcher(world, "alice")
    job = ann.submit("-N2", "--no-requeue", "-o", "/dev/null", script="srun -N2 -n2 sleep 3600")
    until(lambda: f"{job}.0" in world.slurm("squeue", "-h", "-s", "-o", "%i"), "the step runs")
    container = DockerEngine().client.containers.get(world.running(WORKERS[1]).container)
    container.kill()
    try:
        ann.wait_for(job, "NODE_FAIL")
        page = json.loads(ann(f"minivm job {job} --json"))
        assert page["headline"] == f"Its node failed: slurmctld lost {WORKERS[1]} while the job ran."
        assert page["cause"] == "the machine"
        assert any(WORKERS[1] in line for line in page["unknown"]), "its box is missing"
        ends = [fact["text"] for fact in page["evidence"] if fact["text"].startswith("step ")]
        assert all("of the nodes that told" in text for text in ends if "first" in text), ends
    finally:
        container.start()
        world.wait_ready()
        world.wait_idle()


KILLED = {"slurm-login-0": "health.jobs.snapshot", WORKERS[0]: "health.runner", WORKERS[1]: "health.runner"}


def test_a_kill_of_what_answers_costs_a_page_no_more_than_a_named_gap(world: World) -> None:
    """The snapshot, and the runners that give boxes: killed before and while the command asks them."""
    ann = Researcher(world, "alice")
    job = ann.submit("-N2", "-o", "/dev/null", script=FAILS.format(first=WORKERS[0], end="exit 7"))
    ann.wait_for(job, "FAILED")

    def page() -> dict[str, Any]:
        read = json.loads(ann(f"minivm job {job} --json"))
        return {key: read[key] for key in ("headline", "cause", "unknown")}  # times are estimates

    until(lambda: "First failed task" in page()["headline"] and not page()["unknown"], "the page is whole", seen=page)
    whole, cut = page(), 0
    for pod, program in KILLED.items():
        kill = ("sh", "-c", f"kill -9 $(pgrep -f '[-]m {program}')")
        for parallel in (False, True, True):
            killer = threading.Thread(target=lambda: world.cluster.exec(pod, kill))  # noqa: B023
            killer.start()
            if not parallel:
                killer.join()
            read = page()
            killer.join()
            if read != whole:
                cut += 1
                assert any(pod in line for line in read["unknown"]), (pod, read)
                assert read["cause"] in (whole["cause"], "not known")
                # The accounting's part of the headline is there; of the tasks only those that are known.
                assert "First failed task" not in read["headline"], read
        until(lambda: page() == whole, "the next page is whole", seen=page)
    print(f"{cut} of 9 pages had a gap")
