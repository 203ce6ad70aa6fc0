"""A node whose clock is wrong by an hour: real daemons of a whole pod under a wall clock that the test sets.

libfaketime gives each process of the pod the time that a file tells. Only the kernel's word that the clock was set has
to come from the kernel: the machine's clock is set to what it shows, which wakes whoever waits for that.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import PREFIX, Pod, World, image_of, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

DOCKERFILE = """\
FROM {image}
RUN apt-get update && apt-get install --yes --no-install-recommends libfaketime && rm -rf /var/lib/apt/lists/*
"""
FAKED = {
    "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "FAKETIME_TIMESTAMP_FILE": "/clock/offset",
    "FAKETIME_NO_CACHE": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as in the kernel: only the wall clock can be set
}
HOUR = 3600


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("clock"), "clock") as made:
        # The node is silent for slurmctld while its clock is wrong, on a busy machine for minutes.
        conf = slurm_conf(accounting=False).replace("\nSlurmdTimeout=60\n", "\nSlurmdTimeout=600\n")
        made.configure({"slurm.conf": conf})
        made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"}).wait_ready()
        yield made


@pytest.fixture(scope="module")
def image(site: World) -> Iterator[str]:
    """Build the worker's image with libfaketime in it."""
    tag = f"{PREFIX}-faketime"
    dockerfile = DOCKERFILE.format(image=image_of("worker")).encode()
    site.client.images.build(fileobj=io.BytesIO(dockerfile), tag=tag, rm=True, forcerm=True)
    yield tag
    for pod in site.pods:
        pod.remove()
    site.client.images.remove(tag, force=True)


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """Make the file that sets the offset of the pod's clock."""
    directory = tmp_path / "clock"
    directory.mkdir()
    (directory / "offset").write_text("+0\n")
    return directory / "offset"


@pytest.fixture
def jumps(clock: Path) -> Callable[[int], None]:
    def jump(to: int) -> None:
        """Set the pod's clock to an offset of so many seconds."""
        clock.write_text(f"{to:+d}\n")
        time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_REALTIME))

    return jump


@pytest.mark.parametrize(("off", "told", "said"), [(HOUR, "ahead", "ahead of"), (-HOUR, "back", "behind")])
def test_a_clock_that_is_an_hour_off_is_told_and_mends_when_it_is_right(
    site: World, image: str, clock: Path, jumps: Callable[[int], None], off: int, told: str, said: str
) -> None:
    host = f"off-{told}"
    pod = site.pod("worker", host, image=image, env=FAKED, volumes={clock.parent: "/clock"}).wait_ready()
    controller = site.pods[0]
    job = controller.run("sbatch", "--parsable", "-w", host, "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    until(lambda: "sleep 7777" in pod.run("ps", "-eo", "args"), "the job runs")
    jumps(off)
    # The leaf cause, with the size, in the pod's own readiness; and the jump itself beside it.
    reason = pod.wait_reason("munge credential refused by slurm-controller:6817: this node's clock is 3,6")
    assert f"s {said} the controller's" in reason
    words = f"clock: set 3,600 s {told}, to "
    until(
        lambda: any(text.startswith(words) for text in pod.status()["degraded"]), "the jump is told", seen=pod.account
    )
    assert f"the clock was set 3,600 s {told}" in pod.run("minivm", "logs", "clockwatch")
    assert int(pod.service("cluster-proof")["starts"]) >= 2
    # init's own timers count on: a service that dies twice comes back at once, and then after its delay.
    for _ in range(2):
        kill_and_wait(pod, "sshd")
    before = pod.service("slurmd")
    jumps(0)
    pod.wait_ready()
    until(
        lambda: not [text for text in pod.status()["degraded"] if text.startswith("clock")],
        "nothing is left of it",
        seen=pod.account,
    )
    after = pod.service("slurmd")
    assert (after["pid"], after["starts"]) == (before["pid"], 1), "nobody was restarted for it"
    assert controller.run("srun", "-w", host, "--overlap", "hostname").strip() == host
    assert "JobState=RUNNING" in show(controller, job) and "Restarts=0" in show(controller, job)
    controller.run("scancel", job)


def show(controller: Pod, job: str) -> str:
    return controller.run("scontrol", "-o", "show", "job", job)


def kill_and_wait(pod: Pod, service: str) -> None:
    pid = pod.service(service)["pid"]
    pod.run("kill", "-9", str(pid))

    def back() -> bool:
        view = pod.service(service)
        return bool(view["ready"]) and view["pid"] != pid

    until(back, f"{service} is back")
