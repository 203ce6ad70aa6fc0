"""What goes wrong around a pod: each ends in a stated reason, and in recovery when the cause goes away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import Pod, World, role_capabilities, slurm_conf, wait_for, world

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

STATIC = "NodeName=static-1 CPUs=1 State=UNKNOWN"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A controller without accounting; each test adds the pods it needs."""
    with world(tmp_path_factory.mktemp("site"), "site") as made:
        made.configure({"slurm.conf": slurm_conf(STATIC, accounting=False)})
        controller = made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"})
        controller.wait_ready()
        yield made


@pytest.fixture
def mounts(site: World, tmp_path: Path) -> Path:
    """Mounts of a pod's own: the cluster's, to be changed."""
    copy = tmp_path / "mounts"
    shutil.copytree(site.mounts, copy, symlinks=True)
    return copy


def key_file(mounts: Path) -> Path:
    return mounts / "secrets" / "munge" / "munge.key"


def test_a_missing_munge_key_is_named_and_its_arrival_mends_the_pod(site: World, mounts: Path) -> None:
    key_file(mounts).unlink()
    pod = site.pod("worker", "nokey", mounts=mounts)
    reason = pod.wait_reason("munge.key is missing")
    assert "mount the cluster's munge key" in reason
    key_file(mounts).write_bytes(site.key)
    pod.wait_ready()


def test_a_wrong_munge_key_is_named_by_the_controller_that_rejects_it(site: World, mounts: Path) -> None:
    key_file(mounts).write_bytes(os.urandom(128))
    pod = site.pod("worker", "wrongkey", mounts=mounts)
    pod.wait_reason("munge key rejected by slurm-controller:6817")
    assert pod.service("munged")["ready"], "munged alone cannot know"
    assert not pod.service("slurmd")["pid"], "slurmd is not started to loop on a key that is wrong"
    # The right key, as a rotated Secret brings it; munged reads it when it is started.
    key_file(mounts).write_bytes(site.key)
    pod.run("minivm", "restart", "munged")
    pod.wait_ready()


def test_a_wrong_munge_key_on_a_login_pod(site: World, mounts: Path) -> None:
    key_file(mounts).write_bytes(os.urandom(128))
    pod = site.pod("login", "wronglogin", mounts=mounts)
    pod.wait_reason("munge key rejected by slurm-controller:6817")


def test_a_controller_that_comes_late_is_waited_for_by_name(site: World) -> None:
    pod = site.pod("worker", "early", env={"MINIVM_CONTROLLER": "late-controller"})
    pod.wait_reason("late-controller")
    assert "late-controller:6817" in pod.why()
    assert not pod.service("slurmd")["pid"], "a slurmd that starts first retries in steps of 20 s"
    controller = _controller(site)
    site.network.disconnect(controller.container)
    site.network.connect(controller.container, aliases=["slurm-controller", "late-controller"])
    pod.wait_ready()


def test_a_controller_that_refuses_is_told_with_its_address(site: World) -> None:
    controller = _controller(site)
    controller.run("minivm", "stop", "slurmctld")
    pod = site.pod("login", "refused")
    reason = pod.wait_reason("refused for")
    assert "tcp slurm-controller:6817 refused" in reason and "resolves to" in reason
    controller.run("minivm", "start", "slurmctld")
    pod.wait_ready()
    pod.run("sinfo")


SSSD = """\
[sssd]
services = nss, pam, ssh
domains = site

[domain/site]
id_provider = ldap
auth_provider = ldap
ldap_uri = ldap://nowhere.invalid
ldap_search_base = dc=example,dc=org
cache_credentials = true
"""


def test_a_directory_that_is_down_does_not_keep_the_pod_from_working(site: World, mounts: Path) -> None:
    (mounts / "secrets" / "sssd").mkdir()
    (mounts / "secrets" / "sssd" / "sssd.conf").write_text(SSSD)
    pod = site.pod("worker", "noldap", mounts=mounts)
    pod.wait_ready()
    assert pod.service("sssd")["state"] == "ready"
    assert pod.run("stat", "-c", "%a %U", "/etc/sssd/sssd.conf").split() == ["600", "root"]
    assert pod.code("getent", "passwd", "nobody-of-the-site")[0] == 2
    assert pod.run("id", "-un").strip() == "root"
    # A killed sssd leaves its pid file; the next one must not believe it.
    pod.run("sh", "-c", "echo 1 > /run/sssd.pid")
    pod.run("kill", "-9", str(pod.service("sssd")["pid"]))
    wait_for("sssd is back", lambda: pod.service("sssd")["ready"], within=30)


WRITABLE = ("/run", "/tmp", "/var/tmp", "/etc/munge", "/etc/slurm", "/var/lib/munge", "/var/log", "/var/spool/slurmd")


@pytest.mark.parametrize("role", ["worker", "login"])
def test_a_read_only_root_with_tmpfs_is_enough(site: World, role: str) -> None:
    pod = site.pod(
        role, f"readonly-{role}", read_only=True, tmpfs=dict.fromkeys((*WRITABLE, "/var/lib/minivm"), "mode=755,exec")
    )
    pod.wait_ready()
    assert pod.code("touch", "/etc/x")[0] != 0
    pod.run("sinfo")
    assert "/run/minivm/ssh/" in pod.run("cat", "/run/minivm/sshd_config"), "host keys where they can be written"


def test_a_directory_that_cannot_be_written_is_named(site: World) -> None:
    pod = site.pod("login", "readonly-bare", read_only=True, tmpfs={"/run": "", "/tmp": ""})
    assert "mount a tmpfs there" in pod.wait_reason("Read-only file system")


def test_a_static_node_gets_its_new_address_and_loses_its_ghosts(site: World) -> None:
    env = {"MINIVM_NODE_MODE": "static"}
    login = site.pod("login", "watcher").wait_ready()
    first = site.pod("worker", "static-1", env=env).wait_ready()
    job = login.run("sbatch", "--parsable", "-w", "static-1", "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    state = f"scontrol -o show job {job}"
    wait_for("the job runs", lambda: "JobState=RUNNING" in login.run(*state.split()))
    first.container.kill()
    first.remove()
    # Another pod takes the old address, so that the recreated one gets a new one.
    site.pod("login", "squatter")
    second = site.pod("worker", "static-1", env=env).wait_ready()
    assert "Restarts=1" in login.run(*state.split())
    login.run("scancel", job)
    node = login.run("scontrol", "-o", "show", "node", "static-1")
    second.container.reload()
    address = second.container.attrs["NetworkSettings"]["Networks"][site.network.name]["IPAddress"]
    assert f"NodeAddr={address} " in node
    assert login.run("srun", "-w", "static-1", "hostname").strip() == "static-1"
    # A restart of slurmd in the pod is not a fresh pod: its job lives.
    job = login.run("sbatch", "--parsable", "-w", "static-1", "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    wait_for("the job runs", lambda: "JobState=RUNNING" in login.run("scontrol", "-o", "show", "job", job))
    second.run("minivm", "restart", "slurmd-static")
    assert "JobState=RUNNING" in login.run("scontrol", "-o", "show", "job", job)
    assert "Restarts=0" in login.run("scontrol", "-o", "show", "job", job)
    login.run("scancel", job)


def test_a_wrong_drop_in_at_boot_ends_the_pod_with_one_clear_message(site: World, mounts: Path) -> None:
    (mounts / "config" / "services.d").mkdir()
    (mounts / "config" / "services.d" / "extra.yaml").write_text("command: [/bin/sleep, inf]\nneds: [munged]\n")
    pod = site.pod("login", "wrongdropin", mounts=mounts)
    assert pod.container.wait(timeout=30)["StatusCode"] == 78
    assert "extra.yaml" in pod.logs() and "did you mean needs?" in pod.logs()


def test_programs_of_supervisor_run_unchanged(site: World, mounts: Path) -> None:
    (mounts / "config" / "supervisor.d").mkdir()
    (mounts / "config" / "supervisor.d" / "site.conf").write_text(
        "[program:beat]\ncommand=/bin/sh -c 'echo beat $WORD; exec sleep 1000'\nenvironment=WORD=\"strong\"\n"
    )
    pod = site.pod("login", "programs", mounts=mounts).wait_ready()
    wait_for("it runs", lambda: pod.service("beat")["state"] == "ready")
    assert "beat strong" in pod.run("minivm", "logs", "beat")


def test_capabilities_are_the_named_ones_alone(site: World) -> None:
    pod = site.pod("worker", "bounded").wait_ready()
    bounding = next(line for line in pod.run("cat", "/proc/1/status").splitlines() if line.startswith("CapBnd"))
    assert int(bounding.split()[1], 16).bit_count() == len(role_capabilities("worker"))
    for name in ("munged",):
        status = pod.run("cat", f"/proc/{pod.service(name)['pid']}/status")
        assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status, "no setuid program gives any back"


def _controller(site: World) -> Pod:
    return next(pod for pod in site.pods if pod.name.endswith("slurm-controller"))
