"""gitsync inside the image, with Debian's git, GitPython and OpenSSH, against a real sshd: keys, hosts, refusals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gitsync.tree.admit import MARKER
from tests.container.conftest import docker
from tests.container.init_pods import IMAGES
from tests.process.gitsync_world import GOOD_TREE, World, run
from tests.waiting import until

pytestmark = pytest.mark.docker

SSHD = (
    "/usr/sbin/sshd -D -e -f /dev/null -p 2222 -o HostKey=/root/host -o PermitRootLogin=prohibit-password "
    "-o AuthorizedKeysFile=/root/authorized -o StrictModes=no -o UsePAM=no -o PidFile=none"
)
SECRETS = "/mnt/minivm/secrets/gitsync"


@dataclass
class Pod:
    """A container of the login role that is its own git server."""

    name: str
    world: World

    def sh(self, command: str, *, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "exec", self.name, "/bin/sh", "-c", command], capture_output=True, text=True, check=False
        )
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def put(self, source: Path, target: str, mode: str) -> None:
        docker("cp", str(source), f"{self.name}:{target}")
        self.sh(f"chown -R 0:0 {target} && chmod {mode} {target}")

    def push(self) -> None:
        """Copy the current upstream repository into the container."""
        self.sh("rm -rf /srv/scripts.git && mkdir -p /srv")
        docker("cp", str(self.world.upstream.path), f"{self.name}:/srv/scripts.git")
        self.sh("chown -R 0:0 /srv/scripts.git")

    def state(self) -> dict[str, object]:
        found = json.loads(self.sh("gitsync status --json", check=False))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    world = World.make(tmp_path)
    # The image's own tree has every kind of scripts; this one says which it means to be without.
    world.upstream.write({MARKER: '{"name": "minivm-scripts", "without": ["health.d", "task_prolog.d"]}\n'})
    name = docker(
        "run", "--detach", "--network", "none", "--entrypoint", "/bin/sleep",
        "--env", "MINIVM_GITSYNC_REPO=ssh://root@127.0.0.1:2222/srv/scripts.git",
        "--env", "MINIVM_POD_NAME=login-0", f"{IMAGES}/login:latest", "infinity",
    )  # fmt: skip
    try:
        pod = Pod(name, world)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "host")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "deploy")
        pod.sh(f"mkdir -p {SECRETS} /run/sshd")
        pod.put(tmp_path / "host", "/root/host", "0600")
        pod.put(tmp_path / "deploy.pub", "/root/authorized", "0600")
        # As Kubernetes mounts a secret under fsGroup: readable to a group, which ssh by itself refuses.
        pod.put(tmp_path / "deploy", f"{SECRETS}/ssh", "0440")
        pod.put(world.settings.allowed_signers, f"{SECRETS}/allowed_signers", "0444")
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:2222 {(tmp_path / 'host.pub').read_text()}")
        pod.put(known, f"{SECRETS}/known_hosts", "0444")
        docker("exec", "--detach", name, "/bin/sh", "-c", f"exec {SSHD}")
        probe = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/2222' && echo listens"
        until(lambda: "listens" in pod.sh(probe, check=False), "sshd listens")
        yield pod
    finally:
        docker("rm", "--force", name)


def test_a_signed_commit_comes_over_ssh_and_the_next_is_refused(pod: Pod) -> None:
    first = pod.world.upstream.commit(dict(GOOD_TREE), signer=pod.world.alice)
    pod.push()
    said = pod.sh("gitsync once")
    assert f"published {first[:12]}" in said and "alice@example.org" in said
    # The whole commit arrived, and the runner's door opens on it.
    assert pod.sh("cat /var/lib/minivm/scripts/current/prolog.d/10-hello") == GOOD_TREE["prolog.d/10-hello"]
    code = "from gitsync import lease; held = lease.hold(); print(held.commit, held.locked)"
    assert pod.sh(f"/opt/minivm/bin/python3 -I -c '{code}'").strip() == f"{first} True"
    pod.world.upstream.commit({"new": "x"}, signer=pod.world.mallory)
    pod.push()
    refused = pod.sh("gitsync once", check=False)
    assert "no allowed signer holds" in refused
    assert pod.state()["current"] == first


def test_an_unknown_host_key_is_refused_with_what_to_do(pod: Pod, tmp_path: Path) -> None:
    pod.world.upstream.commit(dict(GOOD_TREE), signer=pod.world.alice)
    pod.push()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "impostor")
    known = tmp_path / "wrong_hosts"
    known.write_text(f"[127.0.0.1]:2222 {(tmp_path / 'impostor.pub').read_text()}")
    pod.put(known, f"{SECRETS}/known_hosts", "0444")
    said = pod.sh("gitsync once", check=False)
    assert "Host key verification failed" in said and "MINIVM_GITSYNC_KNOWN_HOSTS" in said
    assert pod.state()["current"] == "zero"


def test_a_key_the_server_does_not_take_is_said(pod: Pod, tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    pod.put(tmp_path / "other", f"{SECRETS}/ssh", "0400")
    said = pod.sh("gitsync once", check=False)
    assert "Permission denied" in said and "MINIVM_GITSYNC_SSH_KEY" in said


def test_the_images_own_tree_passes_its_own_checks(pod: Pod) -> None:
    """Generation zero, committed and signed, is published by the gitsync beside it: checks, recordings and all."""
    zero = pod.world.folder / "generation-zero"
    docker("cp", f"{pod.name}:/usr/share/minivm/scripts", str(zero))
    files: dict[str, str | bytes | None] = {
        str(path.relative_to(zero)): path.read_bytes()
        for path in sorted(zero.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    commit = pod.world.upstream.commit(files, signer=pod.world.alice)
    pod.push()
    pod.sh("gitsync once")
    assert pod.state()["current"] == commit


def test_an_image_refuses_a_tree_without_checks_and_the_past(pod: Pod) -> None:
    """Use the generation zero that the build put into the image."""
    pod.world.upstream.commit({**GOOD_TREE, MARKER: '{"name": "minivm-scripts"}\n'}, signer=pod.world.alice)
    pod.push()
    assert "it has no script in health.d, task_prolog.d" in pod.sh("gitsync once", check=False)
    pod.world.upstream.clock -= 20 * 365 * 86400
    pod.world.upstream.commit({"new": "x"}, signer=pod.world.alice)
    pod.push()
    assert "than the oldest commit that this node accepts (generation zero)" in pod.sh("gitsync once", check=False)
    assert pod.state()["current"] == "zero"
