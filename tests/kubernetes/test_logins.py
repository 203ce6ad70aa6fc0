"""Login pods that keep their sessions: a roll-out ends none, and new logins go on."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.kubectl import condition, going
from tests.kubernetes.ssh import Door
from tests.kubernetes.world import Release
from tests.support.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)


def logins(release: Release, *, leaving: bool = False) -> dict[str, str]:
    """Name and address of the login pods that are ready, or of those that are leaving."""
    return {
        name: pod["status"]["podIP"]
        for name, pod in release.pods().items()
        if name.startswith("login-") and going(pod) == leaving and (leaving or condition(pod, "Ready"))
    }


def rolled(release: Release, people: dict[str, object] | None = None, **login: object) -> None:
    """Roll the login pod and wait for the new one; the old one may stay."""
    before = set(logins(release))
    release.upgrade(login=login, **({} if people is None else {"people": people}))
    until(lambda: set(logins(release)) - before and not set(logins(release)) & before, "another login pod is there",
          within=180, seen=release.why)  # fmt: skip


@pytest.fixture(scope="module")
def keeping(installed: Release) -> Iterator[Release]:
    """The release with login pods that keep their sessions; before and after it they keep none."""
    if not installed.kubernetes.lab:
        pytest.skip("the addresses of Services and pods of another Kubernetes are not reached from here")
    installed.wait_ready()
    values = copy.deepcopy(installed.over)
    installed.shut()
    try:
        rolled(installed, people(installed, "carol", "dave"), keepSeconds=900)
        yield installed
    finally:
        installed.over = values
        installed.upgrade()
        installed.wait_ready()


def test_a_roll_of_the_login_ends_no_session_and_new_logins_go_on(keeping: Release, tmp_path: Path) -> None:
    """An open session, a copy, a forwarded port and a tmux, through the Service's own address and kube-proxy."""
    release = keeping
    door = Door(release, release.get("service", f"{release.name}-ssh")["spec"]["clusterIP"], 22)
    key = release.key("alice")
    ((old, address),) = logins(release).items()
    host = door.try_("alice", "hostname", key=key).stdout.strip()
    there = door.begin("alice", "echo in; read word; echo $word", key=key)
    assert there.stdout and there.stdout.readline() == "in\n"
    assert door.try_("alice", "tmux new-session -d 'sleep 3000'", key=key).returncode == 0
    options = ["-F", "none", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={door.known}", "-i", str(key)]
    (tmp_path / "large").write_bytes(os.urandom(4_000_000))
    copying = subprocess.Popen(["scp", *options, "-l", "1600", tmp_path / "large", f"alice@{door.address}:copied"])
    port = free_port()
    forward = subprocess.Popen(["ssh", *options, "-N", "-L", f"{port}:localhost:22", f"alice@{door.address}"])
    try:
        until(lambda: banner(port), "the port is forwarded")
        release.upgrade(login={"env": {"MINIVM_USER_ROLLED": "yes"}})
        slowest = 0.0

        def is_new() -> bool:
            nonlocal slowest
            begun = time.monotonic()
            done = door.try_("bob", "hostname", key=release.key("bob"))
            slowest = max(slowest, time.monotonic() - begun)
            assert done.returncode == 0, f"a new login: {done.stderr}"
            return old in logins(release, leaving=True) and done.stdout.strip() != host

        until(is_new, "new logins go to the new pod", within=180, seen=release.why)
        print(f"the slowest new login took {slowest:.1f} s")
        told = release.run(old, "minivm", "status")
        assert "1 person stays until" in told, told
        assert banner(port), "the forwarded port"
        assert there.communicate("still", timeout=120)[0] == "still\n", "the open session"
        assert copying.wait(120) == 0, "the copy"
        sums = door.try_("alice", "sha256sum < copied; cat .minivm/login-pods/*", key=key).stdout.splitlines()
        with (tmp_path / "large").open("rb") as large:
            wanted = subprocess.run(["sha256sum"], stdin=large, capture_output=True, text=True, check=True).stdout
        assert sums[0] == wanted.strip() and sums[1].split()[1] == address, "his home names the old pod"
        # slurmctld finds the host of an srun by its name; while it cannot, the srun hangs for ten seconds.
        assert door.try_("alice", "srun -N1 hostname", key=key).returncode == 0
        assert "Unable to resolve" not in release.run("controller-0", "minivm", "logs", "slurmctld")
        inside = Door(release, address, 22)
        refused = inside.try_("bob", "true", key=release.key("bob"))
        assert refused.returncode and "Log in again for a new pod" in refused.stderr + refused.stdout
        forward.kill()
        assert inside.try_("alice", "tmux kill-server", key=key).returncode == 0, "he is let in again, and leaves"
        begun = time.monotonic()
        until(lambda: old not in logins(release, leaving=True), "the old pod ends", seen=release.why)
        print(f"the old pod was gone {time.monotonic() - begun:.1f} s after its last person")
    finally:
        for process in (there, copying, forward):
            process.kill()
            process.communicate()


def test_a_leaving_login_pod_is_told_of_an_earlier_end_and_keeps_to_it(keeping: Release) -> None:
    """`kubectl delete --grace-period`, as an eviction or an uninstall with a shorter grace gives it too."""
    release, key = keeping, keeping.key("alice")
    ((old, address),) = logins(release).items()
    assert Door(release, address, 22).try_("alice", "tmux new-session -d 'sleep 3000'", key=key).returncode == 0
    release.kubectl("delete", "pod", f"{release.name}-{old}", "--wait=false")
    first = until(lambda: stays(release, old), "it tells its end", seen=release.why)
    release.kubectl("delete", "pod", f"{release.name}-{old}", "--grace-period=60", "--wait=false")
    begun = time.monotonic()
    until(lambda: stays(release, old) not in ("", first), "it tells the earlier end", seen=release.why)
    until(lambda: old not in logins(release, leaving=True), "the pod has ended", seen=release.why)
    print(f"a pod with tmux was gone {time.monotonic() - begun:.1f} s after it got 60 s")


def test_a_person_who_loses_access_loses_the_session_on_a_leaving_pod(keeping: Release) -> None:
    """The kubelet brings a pod that leaves no new file; the pod reads the people from the API server."""
    release, key = keeping, keeping.key("carol")
    ((old, address),) = logins(release).items()
    there = Door(release, address, 22).begin("carol", "echo in; exec sleep 3000", key=key)
    try:
        assert there.stdout and there.stdout.readline() == "in\n", there.communicate(timeout=60)
        rolled(release, env={"MINIVM_USER_ROLLED": "again"})
        until(lambda: stays(release, old), "carol stays", seen=release.why)
        assert there.poll() is None
        release.upgrade(people=people(release, "dave"))
        assert there.wait(timeout=120), "her session has ended"
        until(lambda: old not in logins(release, leaving=True), "the old pod ends", seen=release.why)
    finally:
        there.kill()
        there.communicate()


def people(release: Release, *names: str) -> dict[str, object]:
    """Build a people.yaml, each person with the key of that name."""
    keys = {name: release.key(name).with_suffix(".pub").read_text().strip() for name in names}
    uids = {"carol": 20003, "dave": 20004}
    users = [{"name": name, "uid": uids[name], "group": "lab", "keys": [key]} for name, key in keys.items()]
    return {"groups": [{"name": "lab", "gid": 20000}], "users": users}


def stays(release: Release, pod: str) -> str:
    done = release.kubernetes.attempt(
        "-n", release.namespace, "exec", f"{release.name}-{pod}", "--", "minivm", "status"
    )
    return done.stdout.partition("stays until ")[2][:5]


def banner(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
