"""The fleet's image: one program and what it needs, as a user without rights, on a root that nobody writes to."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import docker, image_of
from tests.container.layers import size
from tests.support.image_programs import SETUID
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
MB = 1000 * 1000
AS_IN_THE_CHART = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none")
CONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: x}}]
"""
FOUND = """
import os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(os.getuid(), *(status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs")))
try:
    open("/var/tmp/x", "w")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def fleet(idle: Callable[[str], Host]) -> Host:
    return idle("fleet")


def test_there_is_nothing_of_slurm_and_nobody_who_listens(fleet: Host) -> None:
    for name in ("slurmctld", "slurmd", "slurmrestd", "slurmdbd", "sackd", "munged", "sshd", "sssd", "mariadbd"):
        assert not fleet.file(f"/usr/sbin/{name}").exists, name
    for name in ("git", "curl", "wget", "ssh", "gcc", "scontrol", "pip", "pip3", "minivm"):
        assert not fleet.exists(name), name
    assert set(fleet.run("find / -xdev -type f -perm -4000").stdout.split()) <= SETUID
    assert not fleet.file("/opt/minivm/lib/python3.13/site-packages/health").exists


def test_it_is_small() -> None:
    assert size(image_of("fleet")) < 190 * MB


def test_its_libraries_are_debians_but_for_the_one_that_the_lock_names(fleet: Host) -> None:
    program = "import aiohttp, yaml, click, kubernetes_asyncio as k; print(aiohttp.__file__, k.__file__, k.__version__)"
    said = fleet.check_output(f"/opt/minivm/bin/python3 -I -c '{program}'").split()
    assert said[0].startswith("/usr/lib/python3/dist-packages/")
    assert said[1].startswith("/usr/local/lib/python3.13/dist-packages/")
    (locked, *_) = json.loads((ROOT / "images/lock/wheels/python.json").read_text())["wheels"]
    assert said[2] == locked["version"]
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split() if "==" in line)
    assert pinned["kubernetes_asyncio"] == locked["version"], "tested with another version than the image has"
    sbom = json.loads(fleet.file("/usr/share/minivm/sbom.spdx.json").content_string)
    (named,) = [one for one in sbom["packages"] if one["name"] == "kubernetes-asyncio"]
    assert named["checksums"] == [{"algorithm": "SHA256", "checksumValue": locked["sha256"]}]


def test_it_runs_as_a_user_without_rights_and_writes_nowhere() -> None:
    command = ("docker", "run", "--rm", *AS_IN_THE_CHART, "--entrypoint", "/opt/minivm/bin/python3", image_of("fleet"))
    done = subprocess.run([*command, "-I", "-c", FOUND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"64035 {'0' * 16} {'0' * 16} 1", "Read-only file system"]


def test_by_itself_it_says_what_is_missing() -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", *AS_IN_THE_CHART, image_of("fleet"), "plan"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: MINIVM_POD_NAMESPACE: cannot read the fleet's settings: it is not set\n"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """Run the fleet as in its pod, before a cluster that does not answer."""
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "config").chmod(0o644)
    tmp_path.chmod(0o755)
    (tmp_path / "webhook").mkdir(mode=0o755)
    (tmp_path / "webhook" / "ca.crt").write_text(make_certificate(30))
    name = f"fleet-{uuid.uuid4().hex[:8]}"
    given = {
        "KUBECONFIG": "/config/config", "MINIVM_POD_NAMESPACE": "hpc", "MINIVM_POD_NAME": "fleet-0",
        "MINIVM_FLEET_RELEASE": "slurm", "MINIVM_FLEET_SLURM": "127.0.0.1:1", "MINIVM_FLEET_LEASE": "slurm-fleet",
        "MINIVM_FLEET_HTTP": "0.0.0.0:8650", "MINIVM_FLEET_WEBHOOK": "/config/webhook",
    }  # fmt: skip
    env = [word for key, value in given.items() for word in ("--env", f"{key}={value}")]
    mount = ("--volume", f"{tmp_path}:/config:ro")
    docker("run", "--detach", "--name", name, *AS_IN_THE_CHART, *env, *mount, image_of("fleet"), "run")
    yield name
    docker("rm", "--force", name)


def make_certificate(days: int) -> str:
    command = f"openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=x -days {days}"
    argv = [*command.split(), "-keyout", "/dev/null"]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def asked(name: str, path: str) -> str:
    program = (
        "import sys, urllib.request as r, urllib.error as e\n"
        "try: reply = r.urlopen(f'http://127.0.0.1:8650{sys.argv[1]}')\n"
        "except e.HTTPError as error: reply = error\n"
        "except OSError: sys.exit(0)\n"
        "print(reply.status, reply.read().decode())"
    )
    done = subprocess.run(
        ["docker", "exec", name, "/opt/minivm/bin/python3", "-I", "-c", program, path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def test_without_its_servers_it_lives_is_not_ready_and_ends_when_it_is_told_to(running: str) -> None:
    """PID 1 of its pod: a signal without a handler would not reach it, and each roll-out would wait for the kill."""
    until(lambda: asked(running, "/livez") == "200 ok", "it answers")
    until(lambda: "503 Kubernetes is not known: cannot" in asked(running, "/readyz"), "and says why it is not ready")
    page = asked(running, "/metrics")
    assert "minivm_fleet_leader 0" in page
    (end,) = re.findall(r'minivm_fleet_certificate_end_timestamp_seconds\{file="webhook/ca.crt"\} ([0-9]+)\n', page)
    assert float(end) - time.time() == pytest.approx(30 * 86400, abs=600)
    docker("stop", "--time", "90", running)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", running) == "0"
