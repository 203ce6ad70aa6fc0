"""Pods by Slurm's own auth/slurm: no munged, a key that is missing, wrong, late, or on which a daemon would end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SIGNED = {"MINIVM_AUTH": "slurm"}
REJECTED = "slurm key rejected by slurm-controller:6817"


def key_file(mounts: Path) -> Path:
    return mounts / "secrets" / "slurm-key" / "slurm.key"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("signed"), "signed") as made:
        key_file(made.mounts).parent.mkdir()
        key_file(made.mounts).write_bytes(made.key)
        made.configure({"slurm.conf": slurm_conf(accounting=False, auth="slurm")})
        env = {**SIGNED, "MINIVM_ACCOUNTING": "none"}
        made.pod("controller", "slurm-controller", env=env).wait_ready()
        yield made


@pytest.fixture
def mounts(signed: World, tmp_path: Path) -> Path:
    copy = tmp_path / "mounts"
    shutil.copytree(signed.mounts, copy, symlinks=True)
    return copy


def test_a_missing_key_is_named_and_its_arrival_mends_the_pod(signed: World, mounts: Path) -> None:
    key_file(mounts).unlink()
    pod = signed.pod("worker", "nokey", mounts=mounts, env=SIGNED)
    assert "mount the cluster's slurm.key" in pod.wait_reason("neither slurm.key nor slurm.jwks")
    key_file(mounts).write_bytes(signed.key)
    pod.wait_ready()
    assert "munged" not in {service["name"] for service in pod.status()["services"]}
    assert pod.code("scontrol", "show", "partition")[0] == 0
    sackd = str(pod.service("sackd")["pid"])
    until(lambda: pod.run("pgrep", "-x", "sackd").split() == [sackd], "the sackd of the boot has ended")
    pod.remove()


@pytest.mark.parametrize("role", ["worker", "login"])
def test_a_wrong_key_is_named_by_the_controller_that_rejects_it(signed: World, mounts: Path, role: str) -> None:
    key_file(mounts).write_bytes(os.urandom(128))
    pod = signed.pod(role, f"wrong-{role}", mounts=mounts, env=SIGNED)
    pod.wait_reason(REJECTED)
    daemon = "slurmd" if role == "worker" else "sackd"
    assert not pod.service(daemon)["pid"], "it is not started to loop on a key that is wrong"
    key_file(mounts).write_bytes(signed.key)
    pod.run("minivm", "restart", "slurm-key")
    pod.wait_ready()
    pod.remove()


def test_keys_on_which_daemons_would_end_stay_out(signed: World, mounts: Path) -> None:
    pod = signed.pod("login", "badkeys", mounts=mounts, env=SIGNED).wait_ready()
    key_file(mounts).with_name("slurm.jwks").write_text('{"keys": [{"kid": "a", "kty": "oct", "alg": "none"}]}')
    pod.run("minivm", "restart", "slurm-key", check=False)
    assert '"alg": "HS256"' in pod.wait_reason("slurm.jwks")
    assert pod.code("test", "-e", "/etc/slurm/slurm.jwks")[0] == 1
    assert pod.code("scontrol", "show", "partition")[0] == 0, "what the daemons have goes on"
    key_file(mounts).with_name("slurm.jwks").unlink()
    pod.wait_ready()
    pod.remove()


# The moment in which sackd or slurmd has removed the socket of its path and not yet bound it again.
MEANWHILE = """
import os, subprocess
from init.pod import auth
os.rename(auth.SOCKET, auth.SOCKET + ".bound-later")
with auth.sign_requests("slurm-controller:6817"):
    os.rename(auth.SOCKET + ".bound-later", auth.SOCKET)
    subprocess.run(["scontrol", "show", "partition"], check=True)
assert not os.path.lexists(auth.OWN), "the sackd of the boot left its socket"
"""


def test_a_proof_while_a_daemon_takes_its_socket_leaves_that_socket(signed: World) -> None:
    pod = signed.pod("worker", "meanwhile", env=SIGNED).wait_ready()
    pod.run("env", "MINIVM_AUTH=slurm", "/opt/minivm/bin/python3", "-I", "-c", MEANWHILE)
    assert pod.run("readlink", "-e", "/run/slurm/sack.socket").strip() == "/run/slurm/sack.socket"
    pod.run("scontrol", "show", "slurmd")
    sackd = str(pod.service("sackd")["pid"])
    until(lambda: pod.run("pgrep", "-x", "sackd").split() == [sackd], "no other is left")
    pod.remove()


def test_a_proof_s_sackd_that_cannot_start_says_why(signed: World) -> None:
    pod = signed.pod("worker", "cannot", env=SIGNED).wait_ready()
    pod.run("mv", "/run/slurm/sack.socket", "/run/slurm/gone")
    pod.run("mv", "/etc/slurm/slurm.key", "/etc/slurm/gone.key")
    script = "from init.slurm.registration import prove; raise SystemExit(prove())"
    code, output = pod.code("env", "MINIVM_AUTH=slurm", "/opt/minivm/bin/python3", "-I", "-c", script)
    assert code == 1
    assert "slurm.key" in output
    pod.remove()
