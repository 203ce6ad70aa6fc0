"""enroot in a pod without rights: what it asks the machine for, and what a person is told where that is not granted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container import oci_layout
from tests.container.conftest import docker, image_of
from tests.container.oci_layout import entry, packed
from tests.container.pyxis import build, push
from tests.container.registryd import Registryd
from tests.support.container_node import JOBS, PROFILE, UID, Node, started

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture(scope="module")
def image() -> str:
    build("worker-pyxis")
    return image_of("worker-pyxis")


@pytest.fixture(scope="module")
def registry(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registryd]:
    found = Registryd(tmp_path_factory.mktemp("registry"), auth={})
    found.start()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def node(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = started(image, tmp_path_factory.mktemp("home"), "--security-opt", f"seccomp={PROFILE}")
    made.root("sh", "-c", "echo ENROOT_ALLOW_HTTP y > /etc/enroot/enroot.conf.d/site.conf")
    yield made
    docker("rm", "--force", made.container)


def enroot(node: Node, *words: str, job: str = "7") -> tuple[int, str]:
    """Run enroot as pyxis does: as the job's user, without privileges."""
    line = ["docker", "exec", "--user", UID, "--env", f"SLURM_JOB_ID={job}", "--env", "HOME=/home/u"]
    line += ["--workdir", "/home/u", node.container, "enroot", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_an_image_is_loaded_and_started_without_a_right(node: Node, registry: Registryd) -> None:
    there = push(registry, "site/small:1")
    code, said = enroot(node, "load", "--name", "small", f"docker://{there}")
    assert code == 0, said
    code, said = enroot(node, "start", "small", "sh", "-c", "cat /etc/debian_version /proc/self/status; touch /mine")
    status = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert code == 0 and said.startswith("small\n") and int(status["CapEff"], 16) == 0, said
    assert node.user("stat", "--format=%u", f"{JOBS}/7/enroot/data/small/mine") == "20001"
    # All that it keeps is the job's, and nobody else's.
    assert "enroot" not in node.user("sh", "-c", "ls -a /home/u /home/u/.local /home/u/.cache 2> /dev/null; true")
    assert node.user("stat", "--format=%a", f"{JOBS}/7/enroot") == "700"


def test_what_a_layer_takes_away_is_gone(node: Node, registry: Registryd) -> None:
    """Cover both whiteouts, of a file and of a directory's content; loaded, and as one file, mounted or unpacked."""
    below = [entry(name, b"old") for name in ("kept", "a/gone", "a/stays", "opaque/old")]
    above = [entry("a/.wh.gone"), entry("opaque/.wh..wh..opq"), entry("opaque/new", b"new")]
    oci_layout.write(node.home / "marked", [packed(below), packed(above)])
    there = f"127.0.0.1:{registry.port}"
    copy = [
        "skopeo",
        "copy",
        "-q",
        "--format",
        "v2s2",
        "--dest-tls-verify=false",
        "oci:/home/u/marked",
        f"docker://{there}/site/marked:1",
    ]
    node.user(*copy)
    code, said = enroot(node, "load", "--name", "marked", f"docker://{there}#site/marked:1")
    assert code == 0, said
    place = f"{JOBS}/7/enroot/data/marked"
    found = node.user("sh", "-c", f"cd {place} && find a opaque kept -type f -o -type c | sort")
    assert found.split() == ["a/stays", "kept", "opaque/new"]
    code, said = enroot(node, "import", "--output", "/home/u/marked.sqsh", f"docker://{there}#site/marked:1")
    assert code == 0, said
    listed = set(node.user("unsquashfs", "-d", "", "-l", "/home/u/marked.sqsh").split())
    assert {"/a/stays", "/kept", "/opaque/new"} <= listed and not {"/a/gone", "/opaque/old"} & listed


def test_the_task_prolog_follows_the_runner_s_plan_as_it_does_outside(node: Node, registry: Registryd) -> None:
    """In the container's namespace root's files belong to nobody: no plan would hold, and a Python would start."""
    tree = "/opt/planned/task_prolog.d"
    script = "#!/bin/sh\necho export SAID=$SLURM_JOB_ID.$(stat -c %u /etc/passwd)\n"
    plan = (
        "minivm task_prolog 2\ncommit\tc\ntree\t/opt/planned\nbudget\t8000\nscripts\n10-says\t3000\tcontinue\t\nend\n"
    )
    node.root("sh", "-c", f"mkdir -p {tree} /run/minivm; printf '{script}' > {tree}/10-says; chmod 755 {tree}/10-says")
    node.root("sh", "-c", f"printf '{plan}' > /run/minivm/task_prolog.plan")
    code, said = enroot(node, "load", "--name", "planned", f"docker://{push(registry, 'site/small:3')}")
    assert code == 0, said
    assert enroot(node, "start", "planned", "sh", "/usr/libexec/minivm/task_prolog") == (0, "export SAID=7.0\n")
    # A script that refuses the task, in the words that its user is to read.
    node.root("sh", "-c", f"printf '#!/bin/sh\necho refuse not today\n' > {tree}/10-says")
    code, said = enroot(node, "start", "planned", "true")
    assert code == 1 and "minivm: not today" in said, said
    node.root("rm", "/run/minivm/task_prolog.plan")


def test_where_namespaces_are_not_granted_a_person_is_told_before_anything_is_fetched(
    image: str, registry: Registryd, tmp_path: Path
) -> None:
    plain = started(image, tmp_path)
    try:
        for words in (("load", "docker://127.0.0.1:1#x"), ("start", "x")):
            code, said = enroot(plain, *words)
            assert code == 1 and "users may not make namespaces here" in said, said
            assert "the pod's seccomp profile forbids it" in said and "; the task was not started" in said
            assert "registry" not in said
    finally:
        docker("rm", "--force", plain.container)


def test_a_job_without_a_directory_of_its_own_keeps_nothing_anywhere(node: Node) -> None:
    node.root("sh", "-c", f"mkdir {JOBS}/11; ln -s /tmp {JOBS}/12")
    for job in ("99", "11", "12", "../7", "7/.."):
        code, said = enroot(node, "list", job=job)
        assert code == 1 and "no directory of its own on the node" in said, (job, said)


def test_nothing_of_it_lends_rights(node: Node) -> None:
    found = node.root("sh", "-c", "find / -xdev -perm /6000 -newer /etc/debian_version; true")
    assert not [path for path in found.split() if "mount" in path or "enroot" in path], found
    assert not node.root("sh", "-c", "getcap -r /usr/bin /usr/lib/enroot 2> /dev/null; true")


def test_what_the_runtime_handed_in_of_the_driver_is_there(image: str, registry: Registryd, tmp_path: Path) -> None:
    """Stand-ins lie where NVIDIA's runtime mounts the real ones; the image names no PATH."""
    volumes = []
    for place in ("usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "usr/bin/nvidia-smi"):
        (tmp_path / Path(place).name).write_text(Path(place).name)
        volumes += ["--volume", f"{tmp_path / Path(place).name}:/{place}:ro"]
    (tmp_path / "home").mkdir()
    gpu = started(image, tmp_path / "home", *volumes, "--security-opt", f"seccomp={PROFILE}")
    try:
        gpu.root("sh", "-c", "touch /dev/nvidiactl; echo ENROOT_ALLOW_HTTP y > /etc/enroot/enroot.conf.d/site.conf")
        code, said = enroot(gpu, "load", "--name", "small", f"docker://{push(registry, 'site/small:2')}")
        assert code == 0, said
        line = "cat /usr/local/nvidia/lib64/libcuda.so.1 /usr/local/nvidia/bin/nvidia-smi; echo; echo $LD_LIBRARY_PATH"
        code, said = enroot(gpu, "start", "small", "sh", "-c", line)
        assert (code, said) == (0, "libcuda.so.580.1nvidia-smi\n/usr/local/nvidia/lib64\n"), said
    finally:
        docker("rm", "--force", gpu.container)
