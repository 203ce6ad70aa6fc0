"""Containers in jobs, task by task: Slurm's part is played by the test, the rest is the real image's.

The image is not one of those that are built unless they are named: it is built here, a minute of work once.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container import oci_layout
from tests.container.conftest import IMAGES, docker
from tests.container.oci_layout import entry, packed
from tests.container.registryd import PUSHER, Registryd, root_of
from tests.slurm import built
from tests.support.container_node import JOBS, PROFILE, PROGRAM, UID, Node, started
from tests.waiting import until


@pytest.fixture(scope="module")
def image() -> str:
    return built(IMAGES, "worker-containers")


@pytest.fixture(scope="module")
def registry(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registryd]:
    found = Registryd(tmp_path_factory.mktemp("registry"), auth={})
    found.start()
    found.push(root_of(image), "site/debian:13")
    yield found
    found.kill()


pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture(scope="module")
def node(image: str, registry: Registryd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = started(image, tmp_path_factory.mktemp("home"), "--security-opt", f"seccomp={PROFILE}")
    made.without_tls(f"127.0.0.1:{registry.port}")
    yield made
    docker("rm", "--force", made.container)


def oci(word: str) -> str:
    return f"docker://{word.replace('#', '/')}"


@pytest.fixture(scope="module")
def debian(registry: Registryd) -> str:
    return f"127.0.0.1:{registry.port}#site/debian:13"


def test_an_image_of_a_registry_runs_as_its_user_and_its_exit_code_is_the_task_s(node: Node, debian: str) -> None:
    line = "cat /etc/debian_version; id -un; id -u; pwd; stat -c %u /; echo $PATH; touch /written && ls /var/spool"
    version, *rest = node.say(debian, "sh", "-c", line).splitlines()
    assert version.startswith("13")
    # Without a directory of people nobody knows his name; on a real node it is his own.
    assert rest[:4] == ["user", "20001", "/home/u", "20001"] and rest[4].startswith("/usr/local/sbin:")
    assert "slurmd" not in rest, "nothing of the node's is there but what is named"
    assert node.task(debian, "sh", "-c", "exit 7")[0] == 7
    # The image is the job's, and what one step writes the next one reads; another job's is another.
    assert node.task(debian, "test", "-e", "/written", step="1")[0] == 0
    assert node.task(debian, "test", "-e", "/written", job="8")[0] == 1


def test_it_has_no_right_that_the_job_has_not(node: Node, debian: str) -> None:
    status = node.say(debian, "cat", "/proc/self/status")
    found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(found["CapEff"] + found["CapPrm"] + found["CapBnd"]) == {"0"} and found["NoNewPrivs"] == "1"
    # Bind mounts follow the user's own rights.
    node.root("sh", "-c", "umask 077; mkdir -p /root/secret; echo no > /root/secret/file")
    code, out, err = node.task(debian, "cat", "/mnt/file", MINIVM_CONTAINER_MOUNTS="/root/secret:/mnt")
    assert code != 0 and "no" not in out.split(), (out, err)


def test_a_site_s_data_is_mounted_as_asked(node: Node, debian: str) -> None:
    (node.home / "data").mkdir(exist_ok=True)
    (node.home / "data/one").write_text("1")
    (node.home / "data").chmod(0o777)
    asked = {"MINIVM_CONTAINER_MOUNTS": "/home/u/data:/data:ro", "MINIVM_CONTAINER_HOME": "no"}
    line = "cat /data/one; touch /data/two || echo kept; ls -A /home/u 2> /dev/null; true"
    assert node.say(debian, "sh", "-c", line, **asked) == "1kept\n", "no home"
    for wrong in ("data:/data", "/nothing", "/a:/b:c", "/a:/b:ro:x"):
        code, _, err = node.task(debian, "true", MINIVM_CONTAINER_MOUNTS=wrong)
        assert code == 125 and "MINIVM_CONTAINER_MOUNTS" in err


def test_an_image_may_stay_as_it_was_fetched(node: Node, debian: str) -> None:
    """Files that tasks write beside each other then go to the job's directory, its home and the mounts."""
    line = "touch /etc/new || echo kept; touch /tmp/new $HOME/new && ls /tmp/containers; tail -n1 /etc/passwd"
    out = node.say(debian, "sh", "-c", line, MINIVM_CONTAINER_READONLY="yes").splitlines()
    assert out[0] == "kept" and "lock" in out[1] + out[2] and out[-1].startswith("user:x:20001:"), out
    assert node.user("ls", f"{JOBS}/7/new")
    (node.home / "new").unlink()


def test_a_private_registry_asks_each_user_for_his_own_word(
    node: Node, debian: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    private = Registryd(tmp_path_factory.mktemp("private"))
    private.start()
    try:
        there = f"127.0.0.1:{private.port}"
        node.without_tls(there)
        words = f"{PUSHER.user}:{PUSHER.password}"
        node.user("skopeo", "copy", "-q", "--dest-creds", words, oci(debian), f"docker://{there}/site/debian:13")
        code, _, err = node.task(f"{there}/site/debian:13", "true", step="20", job="8")
        assert code == 125 and "authentication required" in err and "was not started" in err, err
        # As the page says, in his home; what he has said stays there.
        login = ["skopeo", "login", "--authfile", "/home/u/.docker/config.json", "--username", PUSHER.user]
        docker("exec", "--user", UID, node.container, *login, "--password", PUSHER.password, there)
        code, out, err = node.task(f"{there}/site/debian:13", "cat", "/etc/debian_version", step="21", job="8")
        assert code == 0 and out.startswith("13"), err
    finally:
        private.kill()
        node.user("rm", "-rf", "/home/u/.docker")


def test_the_job_s_word_and_the_image_s_each_count_where_they_should(node: Node, tmp_path: Path) -> None:
    """An image's LD_PRELOAD is for its own programs: never for what starts them."""
    place = node.home / "env"
    names = ("usr/bin/env", "usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib64/ld-linux-x86-64.so.2")
    files = [entry("lib64", type=b"2", linkname="usr/lib64"), entry("lib", type=b"2", linkname="usr/lib")]
    for name in names:
        docker("cp", "--follow-link", f"{node.container}:/{name}", str(tmp_path / "file"))
        files.append(entry(name, (tmp_path / "file").read_bytes()))
    env = ["PATH=/image/bin:/usr/bin", "SLURM_JOB_ID=1", "LD_PRELOAD=/evil.so", "HOME=/root", "NCCL_DEBUG=TRACE", "X=Y"]
    oci_layout.write(place, [packed(files)], Env=env, Entrypoint=["/usr/bin/env"])
    code, out, err = node.task("/home/u/env", LD_LIBRARY_PATH="/node/lib", NCCL_DEBUG="INFO", MINE="yes", job="8")
    assert code == 0, err
    said = dict(line.split("=", 1) for line in out.splitlines())
    assert said["PATH"] == "/image/bin:/usr/bin" and said["X"] == "Y" and said["LD_PRELOAD"] == "/evil.so"
    assert said["SLURM_JOB_ID"] == "8" and said["HOME"] == "/home/u" and said["NCCL_DEBUG"] == "INFO"
    assert said["MINE"] == "yes" and "LD_LIBRARY_PATH" not in said
    # The loader complains of what it cannot preload: once for the image's own program, never for bwrap.
    assert err.count("/evil.so") == 1


def test_a_hostile_image_touches_nothing_outside(node: Node) -> None:
    """Set-user-id programs, devices, names and links that lead out, directories that nobody can read."""
    (node.home / "canary").write_text("mine")
    layer = packed(
        [
            entry("root-shell", b"#!/bin/sh\n", mode=0o4755, uid=0),
            entry("dev/sda", type=b"4", devmajor=8, devminor=0),
            entry("../../../../../../../home/u/canary", b"theirs"),
            entry("/home/u/canary", b"theirs"),
            entry("out", type=b"2", linkname="/home/u"),
            entry("out/canary", b"theirs"),
            entry("up", type=b"2", linkname="../../../../../../../../home/u"),
            entry("up/canary", b"theirs"),
            entry("etc", type=b"2", linkname="/home/u"),
            entry("proc", type=b"2", linkname="/home/u"),
            entry("closed", type=b"5", mode=0),
        ]
    )
    oci_layout.write(node.home / "hostile", [layer], Env=["A=B\nC=D"], WorkingDir="../..")
    code, out, err = node.task("/home/u/hostile", "/root-shell", job="8")
    assert code != 0 and "Can't mount on symlink destination /proc" in err, (out, err)
    assert node.user("sh", "-c", f"cat {JOBS}/8/containers/*/rootfs/home/u/canary") == "theirs", "it was unpacked"
    assert (node.home / "canary").read_text() == "mine"
    linked = [entry("hard", type=b"1", linkname="../../../../home/u/canary"), entry("hard", b"theirs")]
    oci_layout.write(node.home / "linked", [packed(linked)])
    code, out, err = node.task("/home/u/linked", "true", job="8")
    assert code == 125 and "cannot unpack" in err and (node.home / "canary").read_text() == "mine", (out, err)
    # Names that remove what is below, of what is above.
    white = [entry(name) for name in ("../../../../../../home/u/.wh.canary", "d/.wh..", "d/.wh...", ".wh...")]
    oci_layout.write(node.home / "white", [packed([entry("d", type=b"5")]), packed(white)])
    node.task("/home/u/white", "true", job="8")
    assert (node.home / "canary").read_text() == "mine"
    # A way that leads out only while everything is put in its place.
    oci_layout.write(node.home / "old", [packed([entry("etc", type=b"2", linkname="../oldroot/home/u")])])
    code, out, err = node.task("/home/u/old", "true", job="8")
    assert code != 0 and not {"hosts", "passwd", "resolv.conf"} & {found.name for found in node.home.iterdir()}, err
    # What nobody understands is an error in words.
    oci_layout.write(node.home / "odd", [], Env=["no equals sign"])
    (node.home / "half/rootfs").mkdir(parents=True)
    (node.home / "half/config.json").write_text(json.dumps({"process": {"env": ["X=\ud800"]}}))
    for name in ("odd", "half"):
        code, out, err = node.task(f"/home/u/{name}", "true", job="8")
        assert code == 125 and "; the task was not started" in err and "Traceback" not in err, (out, err)
    # What of it was unpacked lent nobody rights, and goes with the job.
    node.user("chmod", "-R", "u+rwX", f"{JOBS}/8")
    found = node.user("find", f"{JOBS}/8", "-perm", "/6000", "!", "-uid", "20001")
    assert not found and not node.user("find", f"{JOBS}/8", "-type", "b", "-o", "-type", "c")
    node.user("rm", "-rf", f"{JOBS}/8/containers")


def test_an_image_that_is_too_large_leaves_the_others_their_room(node: Node) -> None:
    """A file of zeros is a thousandth of itself on its way here."""
    node.user("sh", "-c", f"chmod -R u+rwX {JOBS}/8; rm -rf {JOBS}/8/containers")
    before = int(node.root("stat", "--file-system", "--format=%a", JOBS)) - 100
    oci_layout.write(node.home / "huge", [packed([entry("zeros", bytes(600 << 20))])])
    code, _, err = node.task("/home/u/huge", "true", job="8")
    assert code == 125 and "does not fit on this node's disk; the task was not started" in err, err

    def free() -> int:
        return int(node.root("stat", "--file-system", "--format=%a", JOBS))

    until(lambda: free() >= before, "nothing of it stays", seen=lambda: node.user("find", f"{JOBS}/8", "-size", "+1M"))


def test_a_task_that_is_killed_in_the_middle_leaves_no_process_and_no_hindrance(node: Node, debian: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # A registry that takes the question and never answers.
        line = ["env", "-i", PROGRAM, "run", "8", "30", "/spool/task-0/", "/home/u/environment", "--", "true"]
        there = f"127.0.0.1:{silent.getsockname()[1]}"
        # With TLS it would be asked for ten seconds only.
        node.without_tls(there)
        given = {"SLURM_CONTAINER": f"{there}/site/x:1", "HOME": "/home/u"}
        (node.home / "environment").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in given.items()))
        task = subprocess.Popen(["docker", "exec", "--user", UID, node.container, *line])

        def fetching() -> str:
            return subprocess.run(
                ["docker", "exec", node.container, "pgrep", "--runstates", "RSD", "skopeo"],
                capture_output=True,
                text=True,
            ).stdout

        until(lambda: fetching() != "", "it is fetched", seen=lambda: docker("top", node.container))
        node.user("sh", "-c", f"kill -KILL $(pgrep -o -f {PROGRAM})")
        task.wait()
        until(lambda: fetching() == "", "nobody fetches any longer", seen=lambda: docker("top", node.container))
    # Cut while it was unpacked: a directory that its owner may not enter.
    name = hashlib.sha256(oci(debian).encode()).hexdigest()[:16]
    left = f"{JOBS}/8/containers/{name}.making/closed"
    kept = "/home/u/kept"
    node.user("sh", "-c", f"mkdir -p {left}/in {kept}; chmod 500 {kept}; ln -s {kept} {left}; chmod 0 {left}")
    node.user("rm", "-rf", f"{JOBS}/8/containers/{name}")
    code, _, err = node.task(debian, "true", step="31", job="8")
    assert code == 0, err
    assert node.user("stat", "--format=%a", kept) == "500", "what a link leads to is left alone"


def test_what_cannot_be_had_is_a_sentence_and_is_asked_for_once_a_step(node: Node, registry: Registryd) -> None:
    asked = f"127.0.0.1:{registry.port}#site/nothing:1"

    def requests() -> int:
        # The registry writes its log after its answer: a request of the test's own ends what was asked before.
        mark = f"site/mark-{uuid.uuid4().hex}/manifests/1"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{registry.port}/v2/{mark}", timeout=60)
        log = until(lambda: text if mark in (text := (registry.root / "log").read_text()) else "", "it is logged")
        return log.count("site/nothing/manifests")

    for _ in range(3):
        code, _, err = node.task(asked, "true", step="9")
        assert code == 125 and "manifest unknown; the task was not started" in err, err
    once = requests()
    code, _, err = node.task(asked, "true", step="10")
    assert code == 125 and requests() == 2 * once > 0, "another step tries again"
    for wrong in ("", "a b;c", "/etc", "/nothing", "x" * 5000, "$(id)"):
        code, out, err = node.task(wrong, "true")
        assert code == 125 and "the task was not started" in err and "Traceback" not in err, (wrong, out, err)
    code, _, err = node.task(asked, "true", job="99")
    assert code == 125 and "this job has no directory of its own on the node" in err


def test_where_the_runtime_does_not_grant_it_a_person_is_told(image: str, tmp_path: Path) -> None:
    """The engine's own profile: no namespaces of a user's own."""
    plain = started(image, tmp_path)
    try:
        done = subprocess.run(["docker", "exec", "--user", UID, plain.container, PROGRAM, "check"], capture_output=True)
        assert (
            done.returncode == 1
            and b"the pod's seccomp profile forbids it (workers.defaults.seccompProfile)" in done.stdout
        )
        code, _, err = plain.task("/home/u", "true")
        assert code == 125 and "is no image" in err
        code, _, err = plain.task("debian", "true")
        assert code == 125 and "users may not make namespaces here" in err and "was not started" in err, err
    finally:
        docker("rm", "--force", plain.container)


def test_the_profile_grants_namespaces_for_files_and_no_networks(node: Node) -> None:
    made = "import os; os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS{}); print('made')"

    def try_(more: str) -> subprocess.CompletedProcess[str]:
        line = ["docker", "exec", "--user", UID, node.container, "python3", "-c", made.format(more)]
        return subprocess.run(line, capture_output=True, text=True)

    assert try_("").stdout == "made\n"
    refused = try_(" | os.CLONE_NEWNET")
    assert refused.returncode and "Operation not permitted" in refused.stderr

    def alone(code: str) -> str:
        line = ["docker", "exec", "--user", UID, node.container, "python3", "-c", code]
        return subprocess.run(line, capture_output=True, text=True).stderr

    assert "Operation not permitted" in alone("import socket; socket.socket(socket.AF_VSOCK)"), "the machine's own door"
    opened = "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.syscall(430, b'tmpfs', 0)"
    assert "not implemented" in alone(f"{opened}; raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))")
    # What the runtime's own profile forbids stays forbidden; what fails with "no such call" is asked for otherwise.
    names = {name for rule in json.loads(PROFILE.read_text())["syscalls"] for name in rule["names"]}
    assert {"bpf", "keyctl", "open_by_handle_at", "perf_event_open", "userfaultfd"} <= names


def test_what_the_runtime_handed_in_of_the_driver_is_there_and_nothing_without_a_gpu(
    image: str, node: Node, debian: str, tmp_path: Path
) -> None:
    assert "no" in node.say(debian, "sh", "-c", "test -e /usr/local/nvidia || echo no")
    files = tmp_path / "files"
    files.mkdir()
    for name in ("libcuda.so.580.1", "nvidia-smi", "nvidiactl"):
        (files / name).write_text(name)
    volumes = [
        ("libcuda.so.580.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1"),
        ("nvidia-smi", "/usr/bin/nvidia-smi"),
    ]
    options = [part for name, there in volumes for part in ("--volume", f"{files / name}:{there}:ro")]
    home = tmp_path / "home"
    home.mkdir()
    gpu = started(image, home, *options, "--security-opt", f"seccomp={PROFILE}")
    try:
        gpu.root("touch", "/dev/nvidiactl")
        gpu.without_tls(debian.partition("#")[0])
        line = "cat /usr/local/nvidia/lib64/libcuda.so.1 /usr/local/nvidia/bin/nvidia-smi; echo; echo $LD_LIBRARY_PATH"
        assert gpu.say(debian, "sh", "-c", line) == "libcuda.so.580.1nvidia-smi\n/usr/local/nvidia/lib64\n"
        assert gpu.say(debian, "sh", "-c", line).startswith("libcuda"), "a later step, too"
        off = gpu.say(
            debian, "sh", "-c", "cat /usr/local/nvidia/bin/*; echo $LD_LIBRARY_PATH", MINIVM_CONTAINER_GPU="no"
        )
        assert off == "\n"
    finally:
        docker("rm", "--force", gpu.container)
