"""`minivm jupyter` with a real Jupyter server, reached from outside by a real ssh."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cluster.names import free_port
from tests.cluster.researcher import Researcher, World
from tests.cluster.shared_home import SharedHome
from tests.reader import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

WHEELS = ROOT / "build/downloads/jupyter"
PATH = "PATH=$HOME/jupyter/bin:$PATH"
SHOWN = re.compile(r"Jupyter runs in job (\d+) on (\S+) until .*-L 8888:(\S+) alice@(\S+)\n.*\?token=(\w+)", re.DOTALL)


@pytest.fixture(scope="module")
def wheels(world: World, home: SharedHome) -> None:
    """Bring Jupyter's server and what it needs into the shared home: the pods of a test reach no package index."""
    python = world.run("slurm-login-0", "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    platforms = [f"manylinux{release}_{platform.machine()}" for release in ("_2_28", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", f"--dest={WHEELS}",
               "--only-binary=:all:", f"--python-version={python}"]  # fmt: skip
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not list(WHEELS.glob("jupyter_server-*")):
        subprocess.run([*command, *(f"--platform={name}" for name in platforms), "jupyter_server"], check=True)
    target = home.files / "wheels"
    target.mkdir(exist_ok=True)
    for wheel in WHEELS.iterdir():
        (target / wheel.name).write_bytes(wheel.read_bytes())


@pytest.fixture
def shown(alice: Researcher, wheels: None) -> Iterator[tuple[str, ...]]:
    """Run the command as a researcher; return the job, its node, the socket, the address and the token."""
    alice("python3 -m venv ~/jupyter && ~/jupyter/bin/pip install -q --no-index -f /home/wheels jupyter_server")
    try:
        output = alice(f"{PATH} minivm jupyter --mem=400M --time=10")
        match = SHOWN.search(output)
        assert match, output
        yield match.groups()
    finally:
        alice("scancel --me; rm -rf ~/jupyter")


@pytest.fixture
def forwarded(alice: Researcher, shown: tuple[str, ...]) -> Iterator[str]:
    """Forward a port as the output says, and return the address of the server's status."""
    _, _, socket, address, _ = shown
    jump, port = alice.command("-W", "%h:%p", options=()), free_port(22700)
    # `-W` is an option: it comes before the login pod's address.
    line = [*jump[:1], *jump[-2:], *jump[1:-2]]
    command = [jump[0], "-N", "-i", jump[jump.index("-i") + 1], "-o", f"ProxyCommand={' '.join(line)}", "-o",
               "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ExitOnForwardFailure=yes",
               "-L", f"{port}:{socket}", f"alice@{address}"]  # fmt: skip
    with subprocess.Popen(command) as ssh:
        try:
            yield f"http://127.0.0.1:{port}/api/status"
        finally:
            ssh.terminate()


def status(address: str, token: str = "") -> int:
    try:
        with urllib.request.urlopen(f"{address}?token={token}", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_server_is_reached_by_the_line_that_is_printed_and_by_no_other_user(
    alice: Researcher, healthy: World, shown: tuple[str, ...], forwarded: str
) -> None:
    job, node, socket, _, token = shown
    until(lambda: status(forwarded, token) == 200, "the server answers by the forwarded port")
    assert status(forwarded, "wrong") == 403
    bob = Researcher(healthy, "bob")
    connect = f"import socket; socket.socket(socket.AF_UNIX).connect('{socket}')"
    refused = bob.try_(f'srun -Q -w {node} --mem=100M python3 -c "{connect}"')
    assert "PermissionError" in refused.stderr, refused
    assert token not in bob("scontrol show job " + job)

    again = alice(f"{PATH} minivm jupyter")
    assert SHOWN.search(again) and f"job {job} " in again, "a second call shows the same server"
    alice(f"scancel {job}")
    alice.wait_for(job, "CANCELLED")
    until(lambda: alice("ls ~/.local/state/minivm/*.json 2>/dev/null || true") == "", "its record is gone")


def test_a_server_that_does_not_start_is_explained(alice: Researcher) -> None:
    missing = alice.try_("minivm jupyter")
    assert missing.returncode == 1 and "found none of jupyter-lab" in missing.stderr and "pip install" in missing.stderr
    alice("mkdir -p ~/broken && printf '#!/bin/sh\\nexit 3\\n' > ~/broken/jupyter-lab && chmod +x ~/broken/jupyter-lab")
    broken = alice.try_("PATH=$HOME/broken:$PATH minivm jupyter --mem=100M --time=5")
    assert broken.returncode == 1 and "ended before the server listened: FAILED" in broken.stderr, broken.stderr
    refused = alice.try_("PATH=$HOME/broken:$PATH minivm jupyter --partition=nowhere")
    assert refused.returncode == 1 and "invalid partition" in refused.stderr.lower(), refused.stderr
    alice("rm -rf ~/broken")
