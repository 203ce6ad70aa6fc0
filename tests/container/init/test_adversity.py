"""Failures around a pod: each ends in a stated reason, and in recovery when the cause goes away."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import Pod, World, role_capabilities, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

STATIC = "NodeName=static-1 CPUs=1 RealMemory=1000 State=UNKNOWN"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Run a controller without accounting; each test adds the pods it needs."""
    with world(tmp_path_factory.mktemp("site"), "site") as made:
        made.configure({"slurm.conf": slurm_conf(STATIC, accounting=False)})
        controller = made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"})
        controller.wait_ready()
        yield made


class Early:
    """A worker and a login pod of a cluster that has no controller yet: they wait while the other tests run."""

    def __init__(self, made: World) -> None:
        made.configure({"slurm.conf": slurm_conf(accounting=False)})
        self.world = made
        self.worker = made.pod("worker", "w1")
        self.login = made.pod("login", "login")

    @property
    def pods(self) -> tuple[Pod, Pod]:
        return self.worker, self.login

    def controller(self) -> Pod:
        return self.world.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"})


@pytest.fixture(scope="module", autouse=True)
def early(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Early]:
    """There from the first test on, so that the last one need not wait for long."""
    with world(tmp_path_factory.mktemp("early"), "early") as made:
        yield Early(made)


@pytest.fixture(autouse=True)
def only_the_controller_stays(site: World) -> Iterator[None]:
    """Each test's pods go with it: they would only take the next one's processor time."""
    before = list(site.pods)
    yield
    for pod in [pod for pod in site.pods if pod not in before]:
        pod.remove()
        site.pods.remove(pod)


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


def test_a_login_pod_that_nobody_could_use_waits_for_a_people_file_without_mistakes(site: World, mounts: Path) -> None:
    """A roll-out with a mistake in the file stops at its first pod, before anybody is locked out."""
    file = mounts / "people" / "people.yaml"
    file.parent.mkdir()
    text = "groups: [{{name: lab, gid: 20000}}]\nusers: [{{name: ada, uid: {uid}, group: lab, keys: []}}]\n"
    file.write_text(text.format(uid=0))
    pod = site.pod("login", "nobodylogin", mounts=mounts)
    pod.wait_reason("wanted 1000 to 59999")
    file.write_text(text.format(uid=15001))
    pod.wait_ready()
    assert pod.run("id", "-u", "ada").strip() == "15001"


def test_a_wrong_munge_key_on_a_login_pod(site: World, mounts: Path) -> None:
    key_file(mounts).write_bytes(os.urandom(128))
    pod = site.pod("login", "wronglogin", mounts=mounts)
    pod.wait_reason("munge key rejected by slurm-controller:6817")
    key_file(mounts).write_bytes(site.key)
    pod.run("minivm", "restart", "munged")
    pod.wait_ready()
    # And the other way round: what was proven was the key before.
    key_file(mounts).write_bytes(os.urandom(128))
    pod.run("minivm", "restart", "munged")
    pod.wait_reason("munge key rejected by slurm-controller:6817")


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
    killed = pod.service("sssd")["pid"]
    pod.run("kill", "-9", str(killed))
    until(lambda: (view := pod.service("sssd"))["ready"] and view["pid"] != killed, "sssd is back")


WRITABLE = ("/run", "/tmp", "/var/tmp", "/etc/munge", "/etc/slurm", "/var/lib/munge", "/var/lib/minivm", "/var/log")
OF_ROLE = {
    "worker": ("/var/spool/slurmd",),
    "login": (),
    "controller": ("/var/lib/mysql", "/var/spool/slurmctld"),
}


@pytest.mark.parametrize("role", list(OF_ROLE))
def test_a_read_only_root_with_tmpfs_is_enough(site: World, mounts: Path, role: str) -> None:
    host = f"readonly-{role}"
    env = {}
    if role == "controller":  # of a cluster of its own, by the image's slurm.conf
        shutil.rmtree(mounts / "config" / "slurm")
        env = {"MINIVM_CONTROLLER": host}
    tmpfs = dict.fromkeys((*WRITABLE, *OF_ROLE[role]), "mode=755,exec")
    pod = site.pod(role, host, env=env, mounts=mounts, read_only=True, tmpfs=tmpfs)
    pod.wait_ready()
    assert pod.code("touch", "/etc/x")[0] != 0
    pod.run("sinfo")
    if role == "controller":
        until(lambda: pod.service("slurmdbd")["ready"], "accounting too")
    else:
        assert "/run/minivm/ssh/" in pod.run("cat", "/run/minivm/sshd_config"), "host keys where they can be written"


def test_full_disks_are_named_and_the_pod_mends_when_there_is_room(site: World) -> None:
    """slurmd and munged die, and cannot write what they need to start again; the job that runs knows nothing of it."""
    spool, keys = "/var/spool/slurmd", "/etc/munge"
    disks = {keys: "size=64k,mode=700", spool: "size=1m,mode=755,exec"}
    pod = site.pod("worker", "full", tmpfs=disks).wait_ready()
    controller = _controller(site)
    job = controller.run("sbatch", "--parsable", "-w", "full", "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    until(lambda: "sleep 7777" in pod.run("ps", "-eo", "args"), "the job runs")

    def fill(disk: str) -> None:
        pod.run("sh", "-c", f"head -c 2m /dev/zero > {disk}/junk || true")

    fill(spool)
    pod.run("kill", "-9", str(pod.service("slurmd")["pid"]))
    pod.wait_reason("slurmd: exited 1")
    assert "No space left on device" in pod.run("minivm", "logs", "slurmd")
    pod.run("rm", f"{spool}/junk")
    pod.wait_ready()
    pod.run("rm", f"{keys}/munge.key")
    fill(keys)
    pod.run("kill", "-9", str(pod.service("munged")["pid"]))
    pod.wait_reason("/etc/munge/munge.key: No space left on device")
    pod.run("rm", f"{keys}/junk")
    pod.wait_ready()
    state = controller.run("scontrol", "-o", "show", "job", job)
    assert "JobState=RUNNING" in state and "Restarts=0" in state
    assert "sleep 7777" in pod.run("ps", "-eo", "args")
    controller.run("scancel", job)


@pytest.mark.parametrize("role", list(OF_ROLE))
def test_a_full_disk_ends_no_daemon_and_the_pod_says_which(site: World, mounts: Path, role: str) -> None:
    """Every path that the role writes is full at once, while Slurm is asked."""
    host, env = f"brim-{role}", {}
    if role == "controller":  # of a cluster of its own, by the image's slurm.conf
        shutil.rmtree(mounts / "config" / "slurm")
        env = {"MINIVM_CONTROLLER": host}
    if role != "worker":
        # slurmctld asks the addresses of workers that went, which this pod may have now; such a question ends sackd.
        forget_workers(_controller(site))
    paths = (*WRITABLE, *OF_ROLE[role])
    sizes = {path: "size=400m" if path == "/var/lib/mysql" else "size=24m" for path in paths}
    tmpfs = {path: f"{size},mode=755,exec" for path, size in sizes.items()}
    pod = site.pod(role, host, env=env, mounts=mounts, tmpfs=tmpfs).wait_ready()
    if role == "controller":
        until(lambda: pod.service("slurmdbd")["ready"], "accounting too")

    def daemons() -> dict[str, tuple[int, int]]:
        """Return how often each daemon began and failed; one that hands over to its successor does neither."""
        services = [view for view in pod.status()["services"] if view["kind"] == "longrun"]
        return {view["name"]: (view["starts"], view["failures"]) for view in services}

    def starting() -> list[str]:
        return [view["name"] for view in pod.status()["services"] if view["state"] in ("preparing", "starting")]

    def told() -> str:
        return next((text for text in pod.status()["degraded"] if text.startswith("room: ")), "")

    def is_full(path: str) -> bool:
        # A daemon may remove a file meanwhile.
        pod.run("sh", "-c", f"head -c 1G /dev/zero >> {path}/junk 2>/dev/null || true")
        return pod.run("stat", "-fc", "%a", path).strip() == "0"

    # The pod is ready before those that it can do without.
    until(lambda: not starting(), "no daemon is about to start", seen=starting)
    before = daemons()
    for path in paths:
        until(lambda path=path: is_full(path), f"{path} is full")  # type: ignore[misc]
    look_at_room(pod)
    wanted = [path for path in ("/var/log", "/var/tmp", "/tmp", "/run", *OF_ROLE[role]) if path != "/var/lib/mysql"]
    until(lambda: all(f"{path} is full" in told() for path in wanted), "the pod names each", seen=pod.account)
    pod.run("sinfo")
    pod.run("scontrol", "ping")
    if role == "controller":
        assert "/var/lib/mysql is full" in told()
        pod.code("sacctmgr", "-i", "add", "account", "brim")
        pod.code("sbatch", "--hold", "-o", "/dev/null", "--wrap", "true")
    if role == "worker":
        _controller(site).code("srun", "-w", host, "--immediate=5", "--chdir=/", "true")
    assert daemons() == before, f"{pod.account()}\nsackd: {pod.code('minivm', 'logs', 'sackd')}"
    for path in paths:
        pod.run("rm", f"{path}/junk")
    look_at_room(pod)
    until(lambda: not told(), "and is content when there is room", seen=pod.account)
    pod.wait_ready()
    assert daemons() == before


def look_at_room(pod: Pod) -> None:
    """Do now what the pod does every 30 seconds."""
    pod.run("minivm", "restart", "room")


def keys_told(pod: Pod) -> str:
    return next((text for text in pod.status()["degraded"] if text.startswith("keys: ")), "")


def compare_keys(pod: Pod) -> None:
    """Do now what the pod does every 45 seconds."""
    pod.run("minivm", "restart", "keys")


def make_host_key(mounts: Path) -> str:
    """Mount a new host key; its public half."""
    place = mounts / "secrets" / "ssh" / "ssh_host_ed25519_key"
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place], check=True)
    return place.with_suffix(".pub").read_text().split()[1]


def test_a_rotated_host_key_is_taken_and_a_rotated_munge_key_told(site: World, mounts: Path) -> None:
    first = make_host_key(mounts)
    pod = site.pod("login", "rotated", mounts=mounts).wait_ready()

    def shown() -> str:
        return pod.run("ssh-keyscan", "-t", "ed25519", "localhost", check=False)

    until(lambda: first in shown(), "sshd answers with it")
    sshd = pod.service("sshd")["pid"]
    second = make_host_key(mounts)
    compare_keys(pod)
    until(lambda: second in shown(), "sshd has the new key", seen=pod.account)
    assert pod.service("sshd")["pid"] == sshd, "sessions stay"
    (mounts / "secrets" / "ssh" / "ssh_host_ed25519_key").write_text("not a key")
    compare_keys(pod)
    until(lambda: "ssh_host_ed25519_key is no private key" in keys_told(pod), "it is refused", seen=pod.account)
    until(lambda: second in shown(), "sshd keeps the last good one")
    key_file(mounts).write_bytes(os.urandom(128))
    compare_keys(pod)
    words = "the mounted munge key is not the one in use, since 20"
    until(lambda: words in keys_told(pod), "it is told", seen=pod.account)
    assert pod.run("sinfo"), "the old one still serves"


def test_rotated_secrets_of_the_directory_are_told_until_sssd_has_read_them(site: World, mounts: Path) -> None:
    secret = mounts / "secrets" / "sssd"
    secret.mkdir()
    (secret / "sssd.conf").write_text(SSSD)
    (secret / "ca.crt").write_text("the old one")
    pod = site.pod("login", "directory", mounts=mounts).wait_ready()

    seen = ("cat", "/run/minivm/keys.json")
    compare_keys(pod)
    until(lambda: '"sssd"' in pod.code(*seen)[1], "sssd is known with its keys", seen=pod.account)
    (secret / "ca.crt").write_text("the new one")
    (secret / "sssd.conf").write_text(SSSD.replace("cache_credentials = true", "cache_credentials = false"))
    compare_keys(pod)
    until(lambda: "sssd has not read the new ca.crt" in keys_told(pod), "the certificate is told", seen=pod.account)
    assert "the mounted sssd.conf is not the one in use, since 20" in keys_told(pod)
    pod.wait_ready()  # users of before still log in
    assert "the new one" not in pod.code("minivm", "why")[1], "no content is shown"
    pod.run("minivm", "restart", "sssd")
    compare_keys(pod)
    until(lambda: not keys_told(pod), "it has read both", seen=pod.account)
    assert pod.code("grep", "-q", "cache_credentials = false", "/etc/sssd/sssd.conf")[0] == 0
    is_private = ("sh", "-c", f'test "$(stat -c %a:%U {seen[1]})" = 600:root')
    assert pod.code(*is_private)[0] == 0, "digests of keys are root's"


def test_a_directory_that_cannot_be_written_is_named(site: World) -> None:
    pod = site.pod("login", "readonly-bare", read_only=True, tmpfs={"/run": "", "/tmp": ""})
    assert "mount a tmpfs there" in pod.wait_reason("Read-only file system")


def test_a_static_node_gets_its_new_address_and_loses_its_ghosts(site: World) -> None:
    env = {"MINIVM_NODE_MODE": "static"}
    login = site.pod("login", "watcher").wait_ready()
    first = site.pod("worker", "static-1", env=env).wait_ready()
    job = login.run("sbatch", "--parsable", "-w", "static-1", "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    state = f"scontrol -o show job {job}"
    until(lambda: "JobState=RUNNING" in login.run(*state.split()), "the job runs")
    first.remove()  # at once, as a machine that fails
    # Another pod takes the old address, so that the recreated one gets a new one.
    site.pod("login", "squatter")
    second = site.pod("worker", "static-1", env=env).wait_ready()
    until(lambda: "Restarts=1" in login.run(*state.split()), "the lost job was requeued")
    login.run("scancel", job)
    node = login.run("scontrol", "-o", "show", "node", "static-1")
    second.container.reload()
    address = second.container.attrs["NetworkSettings"]["Networks"][site.network.name]["IPAddress"]
    assert f"NodeAddr={address} " in node
    assert login.run("srun", "-w", "static-1", "hostname").strip() == "static-1"
    # A restart of slurmd in the pod is not a fresh pod: its job lives.
    job = login.run("sbatch", "--parsable", "-w", "static-1", "-o", "/dev/null", "--wrap", "sleep 7777").strip()
    until(lambda: "JobState=RUNNING" in login.run("scontrol", "-o", "show", "job", job), "the job runs")
    second.run("minivm", "restart", "slurmd-static")
    assert "JobState=RUNNING" in login.run("scontrol", "-o", "show", "job", job)
    assert "Restarts=0" in login.run("scontrol", "-o", "show", "job", job)
    login.run("scancel", job)


def test_the_limits_of_the_pod_are_slurms_limits_of_the_node(site: World) -> None:
    login = site.pod("login", "asker").wait_ready()
    machine = int(login.run("nproc"))
    pod = site.pod("worker", "limited", nano_cpus=10**9, mem_limit="1g", env={"MINIVM_NODE_FEATURES": "small"})
    pod.wait_ready()
    node = login.run("scontrol", "-o", "show", "node", "limited")
    words = dict(word.partition("=")[::2] for word in node.split())
    assert words["AvailableFeatures"] == "minivm,small"
    assert int(words.get("CoreSpecCount", 0)) == machine - 1
    assert int(words["RealMemory"]) - int(words["MemSpecLimit"]) == 1024


def test_slurmrestd_answers_with_a_token(site: World, mounts: Path, tmp_path: Path) -> None:
    """A second cluster of one pod, booted from the image's own small slurm.conf."""
    shutil.rmtree(mounts / "config" / "slurm")
    (mounts / "secrets" / "slurm").mkdir()
    (mounts / "secrets" / "slurm" / "jwt_hs256.key").write_bytes(os.urandom(32))
    env = {"MINIVM_ACCOUNTING": "none", "MINIVM_SLURMRESTD": "0.0.0.0:6820", "MINIVM_CONTROLLER": "rest"}
    pod = site.pod("controller", "rest", env=env, mounts=mounts).wait_ready()
    until(lambda: pod.service("slurmrestd")["ready"], "slurmrestd is ready")
    token = pod.run("scontrol", "token", "username=root").strip().partition("=")[2]
    pod.container.reload()
    address = pod.container.attrs["NetworkSettings"]["Networks"][site.network.name]["IPAddress"]
    url = f"http://{address}:6820/slurm/v0.0.40/ping"

    def is_up(token: str) -> bool:
        request = urllib.request.Request(url, headers={"X-SLURM-USER-NAME": "root", "X-SLURM-USER-TOKEN": token})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return bool(json.load(reply)["pings"][0]["pinged"] == "UP")
        except OSError:
            return False

    until(lambda: is_up(token), "slurmrestd answers", seen=pod.account)
    # Another key: one that is none is refused, and one that is one is taken with what waits.
    key, waits = mounts / "secrets" / "slurm" / "jwt_hs256.key", ("squeue", "--noheader", "--format=%A")
    pod.add_user()
    pod.run("sbatch", "--hold", "--chdir=/", "--output=/dev/null", "--wrap", "true", user="demo")
    job = pod.run(*waits).strip()
    assert job, "a job waits"
    key.write_bytes(b"short")
    compare_keys(pod)
    until(lambda: "the mounted JWT key has 5 bytes" in keys_told(pod), "it is refused", seen=pod.account)
    until(lambda: is_up(token), "the last one still counts", seen=pod.account)
    key.write_bytes(os.urandom(32))
    compare_keys(pod)
    until(lambda: not is_up(token), "tokens of the old key have ended", seen=pod.account)
    until(
        lambda: is_up(pod.code("scontrol", "token", "username=root")[1].strip().partition("=")[2]),
        "tokens of the new one serve",
        seen=pod.account,
    )
    until(lambda: not keys_told(pod), "nothing is told any more", seen=pod.account)
    assert pod.run(*waits).strip() == job, "the job still waits"
    # The one service of this role that the cluster's tests do not have.
    old = pod.service("slurmrestd")["pid"]
    pod.run("kill", "-9", str(old))
    until(lambda: (view := pod.service("slurmrestd"))["ready"] and view["pid"] != old, "slurmrestd is back")


def test_a_login_pod_that_drains_tells_its_sessions_and_waits_for_them(site: World) -> None:
    pod = site.pod("login", "leaving").wait_ready()
    ssh = ssh_as_demo(pod)
    # A session that ends a while after it was told.
    session = "until grep -q 'this pod stops' /tmp/seen; do sleep 0.2; done; sleep 2"
    pod.run("sh", "-c", f'printf "%s\n" "{session}" > /tmp/session')
    pod.run("sh", "-c", f"script -qfc '{' '.join(ssh)} -tt sh /tmp/session' /tmp/seen </dev/null >/dev/null 2>&1 &")

    def is_there() -> bool:
        return "sh /tmp/session" in pod.run("ps", "-u", "demo", "-o", "args", check=False)

    until(is_there, "the session is there")
    pod.run("minivm", "drain")
    assert "this pod stops" in pod.run("cat", "/tmp/seen"), "it was told on its terminal"
    assert not is_there(), "and waited for"
    code, text = pod.code(*ssh, "true")
    assert code != 0 and "about to stop" in text, "nobody new"
    pod.run("minivm", "resume")
    pod.run(*ssh, "true")


def test_a_login_pod_that_keeps_its_sessions_stays_for_tmux_alone(site: World) -> None:
    """Its owner is let in again and finds the pod by a file in his home; new people are sent to another pod.

    Another user's home leads into root's directories: nothing is written there, nor to his terminal by his own file.
    """
    env = {"MINIVM_KEEP_SESSIONS": "yes", "MINIVM_GRACE_SECONDS": "3600", "MINIVM_POD_IP": "10.9.8.7"}
    pod = site.pod("login", "keeping", env=env).wait_ready()
    ssh = ssh_as_demo(pod)
    pod.add_user("eve", 20002)
    pod.run("sh", "-c", "cp -a /home/demo/.ssh /home/eve/ && chown -R eve: /home/eve/.ssh")
    eve = [*ssh[:-1], "eve@localhost"]
    pod.run(*eve, "ln -s /root .minivm; tmux new-session -d 'sleep 600'")
    pod.run(*ssh, "tmux new-session -d 'cat > seen'; tmux set-option -g remain-on-exit on")
    pod.run("sh", "-c", "minivm drain > /tmp/drained 2>&1 &")
    until(lambda: "2 people stay until" in pod.status()["drain"], "it waits for both", seen=pod.account)
    record = "/home/demo/.minivm/login-pods/keeping"
    until(lambda: pod.code("test", "-e", record)[0] == 0, "the home names the pod", seen=pod.account)
    told, window = "login pod keeping is being replaced", "tmux capture-pane -p"
    until(lambda: told in pod.run(*ssh, window), "the window shows it", seen=pod.account)
    pod.add_user("new", 20003)
    pod.run("sh", "-c", "cp -a /home/demo/.ssh /home/new/ && chown -R new: /home/new/.ssh")
    new = [*ssh[:-1], "new@localhost"]
    until(lambda: "Log in again for a new pod" in pod.code(*new, "true")[1], "nobody new", seen=pod.account)
    assert pod.run(*ssh, "tmux list-sessions -F '#{session_id}'").strip() == "$0", "he is let in"
    # What another pod's file says is shown; one with signs of a terminal's own is not.
    pod.run("sh", "-c", f"cd /home/demo/.minivm/login-pods && cp -p {record} other-1 && cp -p {record} other-2")
    pod.run("sh", "-c", r"cd /home/demo/.minivm/login-pods && cp -p other-1 'x$(id)' &&"
            r" printf '4000000000 \033[31m10.1.1.1\n' > other-2")  # fmt: skip
    pod.run("sh", "-c", f"script -qfc '{' '.join(ssh)} -tt bash -lic true' /tmp/login </dev/null >/dev/null 2>&1")
    shown = pod.run("cat", "/tmp/login")
    assert "ssh -o HostKeyAlias=other-1 10.9.8.7" in shown and shown.count("HostKeyAlias") == 2, shown
    assert pod.code("ls", "/root/login-pods")[0] != 0
    pod.run("pkill", "-u", "eve")
    pod.run(*ssh, "tmux kill-server")
    until(lambda: pod.status()["drain"] == "drained", "nobody is left", seen=pod.account)
    until(lambda: pod.code("test", "-e", record)[0] == 1, "the home names the pod no longer")
    pod.run("minivm", "resume")
    pod.run(*new, "true")


def test_the_clusters_pods_know_each_other_without_a_question(site: World, mounts: Path) -> None:
    """Pods trust each other by name alone: other hosts' keys are unknown, and a pod with another key is refused.

    The file may come after the pod.
    """
    keys, known = mounts / "secrets" / "ssh", mounts / "config" / "ssh"
    keys.mkdir()
    known.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "ssh_host_ed25519_key"], check=True)
    here = site.pod("login", "known-0", mounts=mounts).wait_ready()
    there = site.pod("login", "known-1", mounts=mounts).wait_ready()
    false = site.pod("login", "known-2").wait_ready()
    (known / "known_hosts").write_text(f"known-*,known.* {(keys / 'ssh_host_ed25519_key.pub').read_text()}")
    assert false.code("test", "-e", "/etc/ssh/ssh_known_hosts2")[0] == 1, "a pod alone knows nobody"
    ssh_as_demo(here)
    for pod in (there, false):
        pod.add_user()
        pod.run("install", "-d", "-o", "demo", "-m", "700", "/home/demo/.ssh")
        key = here.run("cat", "/root/.ssh_key.pub").strip()
        pod.run("sh", "-c", f"echo '{key}' | install -o demo -m 600 /dev/stdin /home/demo/.ssh/authorized_keys")
    ssh = ("ssh", "-i", "/root/.ssh_key", "-o", "BatchMode=yes")
    assert here.run(*ssh, "demo@known-1", "hostname").strip() == "known-1"
    code, text = here.code(*ssh, "demo@known-2", "hostname")
    assert code == 255 and "REMOTE HOST IDENTIFICATION HAS CHANGED" in text
    assert "verification failed" in here.code(*ssh, "demo@localhost", "hostname")[1], "a name that is not the cluster's"


def test_a_user_who_calls_his_processes_sshd_neither_writes_files_nor_holds_up_the_drain(site: World) -> None:
    """Any name may stand in argv[0]; root reads them when the pod is to stop."""
    pod = site.pod("login", "forged").wait_ready()
    pod.run("install", "-m", "600", "/dev/null", "/etc/victim")
    victim = "eve@pts/../../etc/victim"
    for title in (f"sshd: {victim}", f"sshd-session: {victim}", "sshd-session: eve@notty"):
        pod.run("setpriv", "--reuid=12345", "--clear-groups", "bash", "-c", f"exec -a '{title}' sleep 7777 &")
    until(lambda: pod.run("ps", "-u", "12345", "-o", "args").count("eve@") == 3, "they are there")
    pod.run("minivm", "drain")
    assert pod.run("cat", "/etc/victim") == ""
    assert "eve@notty" in pod.run("ps", "-u", "12345", "-o", "args"), "still there, and waited for by nobody"
    assert "no sessions" in pod.run("minivm", "logs", "drain")


def test_a_wrong_drop_in_at_boot_costs_itself_and_is_taken_once_it_is_mended(site: World, mounts: Path) -> None:
    extra = mounts / "config" / "services.d" / "extra.yaml"
    extra.parent.mkdir()
    extra.write_text("command: [/bin/sleep, inf]\nneds: [munged]\n")
    pod = site.pod("login", "wrongdropin", mounts=mounts).wait_ready()
    assert "extra.yaml" in pod.logs() and "did you mean needs?" in pod.logs()
    (told,) = [text for text in pod.status()["degraded"] if text.startswith("drop-ins: ")]
    assert "did you mean needs?" in told
    extra.write_text("command: [/bin/sleep, inf]\nneeds: [munged]\n")
    until(lambda: any(view["name"] == "extra" and view["ready"] for view in pod.status()["services"]), "it is taken")
    until(lambda: not any(text.startswith("drop-ins: ") for text in pod.status()["degraded"]), "nothing is told more")


def test_programs_of_supervisor_run_unchanged(site: World, mounts: Path) -> None:
    (mounts / "config" / "supervisor.d").mkdir()
    (mounts / "config" / "supervisor.d" / "site.conf").write_text(
        "[program:beat]\ncommand=/bin/sh -c 'echo beat $WORD; exec sleep 1000'\nenvironment=WORD=\"strong\"\n"
    )
    pod = site.pod("login", "programs", mounts=mounts).wait_ready()
    until(lambda: pod.service("beat")["state"] == "ready", "it runs")
    # Such a program counts as ready after a second, whatever it has said by then.
    until(lambda: "beat strong" in pod.run("minivm", "logs", "beat"), "it has the word")


def test_capabilities_are_the_named_ones_alone(site: World) -> None:
    pod = site.pod("worker", "bounded").wait_ready()
    bounding = next(line for line in pod.run("cat", "/proc/1/status").splitlines() if line.startswith("CapBnd"))
    assert int(bounding.split()[1], 16).bit_count() == len(role_capabilities("worker"))
    for name in ("munged",):
        status = pod.run("cat", f"/proc/{pod.service(name)['pid']}/status")
        assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status, "no setuid program gives any back"


def test_a_controller_that_comes_a_minute_late_is_waited_for(early: Early) -> None:
    """Nothing is started in vain meanwhile, ssh works, and then all goes on by itself."""

    def waits_for_long(pod: Pod) -> bool:
        found = re.search(r"wait for controller: tcp slurm-controller:6817\b.* for (\d+) (s|min)\b", pod.why())
        return found is not None and int(found[1]) >= {"s": 60, "min": 1}[found[2]]

    for pod in early.pods:
        until(lambda pod=pod: waits_for_long(pod), "the leaf cause, and how long it has lasted", seen=pod.why)  # type: ignore[misc]
        assert not pod.ready()
        assert _failures(pod) == {}, "no crash loop, nothing exhausted"
    assert early.worker.service("slurmd")["starts"] == 0
    assert early.login.service("sackd")["starts"] == 0
    assert early.login.service("sshd")["ready"]
    ssh = ssh_as_demo(early.login)
    early.login.run(*ssh, "true")
    sshd = early.login.service("sshd")["pid"]
    early.controller().wait_ready()
    for pod in early.pods:
        pod.wait_ready()
        assert _failures(pod) == {}, "the first start of each was the right one"
    assert early.worker.service("slurmd")["starts"] == 1
    assert early.login.service("sshd")["pid"] == sshd
    assert early.login.run("srun", "-w", "w1", "--chdir=/tmp", "hostname").strip() == "w1"


def _failures(pod: Pod) -> dict[str, int]:
    return {view["name"]: view["failures"] for view in pod.status()["services"] if view["failures"]}


def ssh_as_demo(pod: Pod) -> list[str]:
    """Make a user with a key in the pod itself, and return the command that logs in with it."""
    pod.add_user()
    pod.run("sh", "-c", "install -d -o demo -m 700 /home/demo/.ssh && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh_key")
    pod.run("sh", "-c", "install -o demo -m 600 /root/.ssh_key.pub /home/demo/.ssh/authorized_keys")
    return ["ssh", "-i", "/root/.ssh_key", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes", "demo@localhost"]


def forget_workers(controller: Pod) -> None:
    """Delete the node of each worker pod of an earlier test, all of which are removed."""
    for name in set(controller.run("sinfo", "-hNo", "%N").split()):
        until(
            lambda name=name: controller.code("scontrol", "delete", f"nodename={name}")[0] == 0,  # type: ignore[misc]
            f"{name} has no job that completes",
            within=300,  # after SlurmdTimeout and a ping slurmctld gives up a job that completes on a pod that is gone
        )


def _controller(site: World) -> Pod:
    return next(pod for pod in site.pods if pod.name.endswith("slurm-controller"))
