"""Shared setup of the container tests: the built images, and one idle container of each role to look into."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
import testinfra  # type: ignore[import-untyped]  # ships no types
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

ROLES = ("controller", "login", "worker")
# Images that were built under another name can be tested too: MINIVM_TEST_IMAGES=registry/prefix.
IMAGES = os.environ.get("MINIVM_TEST_IMAGES", "minivm")


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def image_of(role: str) -> str:
    """Name the newest build of a role, by the alias that `build.py build` moves."""
    name = f"{IMAGES}/{role}:latest"
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        pytest.fail(f"no image {name}: build it first (make images)")
    return name


@pytest.fixture(scope="session")
def idle() -> Iterator[Callable[[str], Host]]:
    """`idle("worker")`: a host to look into, whose only process sleeps. One container a role and session."""
    containers: dict[str, str] = {}

    def start(role: str) -> Host:
        if role not in containers:
            containers[role] = docker(
                "run", "--detach", "--network", "none", "--entrypoint", "/bin/sleep", image_of(role), "infinity"
            )
        return testinfra.get_host(f"docker://{containers[role]}")

    yield start
    for container in containers.values():
        docker("rm", "--force", container)


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def host(role: str, idle: Callable[[str], Host]) -> Host:
    """Yield a container of each role in turn."""
    return idle(role)


def with_munge(host: Host, *lines: str) -> str:
    """Write a slurm.conf and start a munged in the container; Slurm's daemons need no less to start."""
    socket = "/tmp/munge/socket"
    if not host.file(socket).exists:
        host.check_output("install -d -m 0755 -o munge -g munge /tmp/munge")
        options = f"--key-file=/tmp/munge/key --socket={socket} --pid-file=/tmp/munge/pid --seed-file=/tmp/munge/seed"
        start = f"mungekey --create --keyfile=/tmp/munge/key && munged {options} --log-file=/tmp/munge/log"
        host.check_output(f"su -s /bin/sh munge -c '{start}'")
    node = f"NodeName={host.check_output('hostname')} CPUs=1"
    base = ("ClusterName=test", "SlurmUser=slurm", "SlurmctldHost=localhost", f"AuthInfo=socket={socket}", node)
    text = "\\n".join((*base, "PartitionName=p Nodes=ALL", *lines))
    host.check_output(f"mkdir -p /tmp/conf && printf '{text}\\n' > /tmp/conf/slurm.conf")
    return "/tmp/conf/slurm.conf"
