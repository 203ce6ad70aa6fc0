"""The lab itself: what it took of this machine it gives back, however the run that had it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helm import helm
from tests.kubernetes import left, plan, programs
from tests.kubernetes.conftest import GIVEN, refusal
from tests.kubernetes.lab import STATE, UP, Lab
from tests.kubernetes.world import IMAGES
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(GIVEN or refusal()), reason=f"no lab here: {refusal() or 'KUBECONFIG is given'}")
# Where kubelets, runtimes, network plugins and kubectl keep their things, if nobody gives them other places.
PLACES = (
    "/run", "/run/netns", "/tmp/hostpath_pv", "/etc", "/opt", "/var/lib", "/var/lib/cni/results", "/var/lib/kubelet",
    "/var/log", "/var/log/containers", "/var/log/pods", str(Path.home()), str(Path.home() / ".kube/cache/discovery"),
)  # fmt: skip
# Of other tests and of docker, which have their own names; the lab's own cgroups are looked at by theirs.
OTHERS = ("veth", "br-", "docker", "DOCKER", "/tmp/", "/minivm-")
# A run of tests, whose child holds the lab in a session of its own.
RUN = """
import subprocess, sys
held = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(held.pid, flush=True)
held.wait()
"""


def standing() -> set[str]:
    """What is there, by whoever it is, and whatever a lab's own look knows of."""
    links = {line.split(": ")[1] for line in left.said("ip", "-o", "link").splitlines()}
    chains = {line.split()[0] for line in left.said("iptables-save").splitlines() if line.startswith(":")}
    mounts = {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}
    cgroups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.is_dir()}
    files = {str(path) for place in PLACES for path in Path(place).glob("*")}
    named = {name for name in links | chains | mounts | cgroups if not any(other in name for other in OTHERS)}
    return named | files


@pytest.fixture(autouse=True)
def machine_as_before() -> Iterator[None]:
    # Whoever waits for the lab holds the file open, so that it stays.
    before = standing() | {f"{UP}.lock"}
    yield
    assert standing() <= before


@contextmanager
def a_run(env: Mapping[str, str] = os.environ) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """With the number of the lab's holder."""
    hold = (sys.executable, "-m", "tests.kubernetes", "hold", "--nodes", "1", "--images", IMAGES)
    run = subprocess.Popen([sys.executable, "-c", RUN, *hold], stdout=subprocess.PIPE, text=True, env=env)
    assert run.stdout
    try:
        yield run, int(run.stdout.readline())
    finally:
        run.kill()
        run.communicate()


def nothing_left() -> bool:
    return not left.look(STATE) and not UP.is_symlink()


def heard(run: subprocess.Popen[str], word: str) -> str:
    assert run.stdout
    return next(line for line in run.stdout if word in line)


def a_pod_runs(tmp_path: Path) -> None:
    """As kubectl brings it, and what Helm brings beside it."""
    lab = Lab.found()
    (tmp_path / "chart/templates").mkdir(parents=True)
    (tmp_path / "chart/Chart.yaml").write_text("{apiVersion: v2, name: one, version: 0.1.0}")
    (tmp_path / "chart/templates/one.yaml").write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: one}}")
    helm(lab.kubeconfig, "install", "one", str(tmp_path / "chart"), values={})
    spec = {"containers": [{"name": "main", "image": plan.PAUSE}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    lab.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    phase = ("get", "pod", "one", "-o", "jsonpath={.status.phase}")
    until(lambda: lab.kubectl(*phase) == "Running", "the pod runs", seen=lambda: lab.kubectl(*phase))


@pytest.mark.parametrize("moment", ["network and keys", "ready /"])
def test_a_run_that_is_killed_leaves_nothing(moment: str, tmp_path: Path) -> None:
    with a_run() as (run, _):
        heard(run, moment)
        there = left.look(STATE)
        assert there.namespaces and there.links and there.routes and there.files
        if moment == "ready /":
            a_pod_runs(tmp_path)
        run.kill()
        until(nothing_left, "the holder has taken the lab down", within=240, seen=lambda: left.look(STATE))


@contextmanager
def a_lab_without_a_holder(tmp_path: Path) -> Iterator[set[str]]:
    """What the kill -9 of everybody who could have taken it down leaves: its processes."""
    with a_run() as (run, holder):
        heard(run, "ready /")
        a_pod_runs(tmp_path)
        old = set(left.look(STATE).processes)
        os.kill(holder, signal.SIGKILL)
        run.wait()
        assert old & set(left.look(STATE).processes)
        yield old


def test_what_is_left_when_the_holder_itself_was_killed_goes_before_the_next_lab(tmp_path: Path) -> None:
    with a_lab_without_a_holder(tmp_path) as old, a_run() as (run, _):
        heard(run, "ready /")
        assert not old & set(left.look(STATE).processes)
        run.kill()
        until(nothing_left, "the second lab is taken down", within=240, seen=lambda: left.look(STATE))


def test_what_is_left_when_the_holder_itself_was_killed_goes_by_kube_down(tmp_path: Path) -> None:
    with a_lab_without_a_holder(tmp_path):
        done = subprocess.run([sys.executable, "-m", "tests.kubernetes", "down"], capture_output=True, text=True)
        assert (done.returncode, nothing_left()) == (0, True), done.stdout + done.stderr


def test_what_unpacks_images_ends_with_the_holder_and_what_it_left_goes_by_kube_down(tmp_path: Path) -> None:
    """In a place of their own they are not unpacked yet."""
    known = programs.build().root
    (tmp_path / known.name).symlink_to(known)
    own = os.environ | {"MINIVM_KUBERNETES": str(tmp_path)}
    with a_run(own) as (run, holder):
        until(lambda: (plan.UNPACKING / "socket").exists(), "images are unpacked")
        os.kill(holder, signal.SIGKILL)
        run.wait()
    until(lambda: not left.started_with(str(plan.UNPACKING)), "it has ended", seen=lambda: left.look(tmp_path / "lab"))
    assert left.look(tmp_path / "lab").files
    down = (sys.executable, "-m", "tests.kubernetes", "down")
    done = subprocess.run(down, capture_output=True, text=True, env=own)
    assert (done.returncode, left.look(tmp_path / "lab")) == (0, plan.Left()), done.stdout + done.stderr


def test_a_build_beside_the_tests_ends_with_them(tmp_path: Path) -> None:
    def builds() -> tuple[str, ...]:
        return left.started_with(str(tmp_path))

    script = "from tests.kubernetes import programs; import time; programs.beside(); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"MINIVM_KUBERNETES": str(tmp_path)})
    try:
        until(lambda: (tmp_path / "work" / "apt").is_dir() and builds(), "the build has begun", seen=builds)
    finally:
        run.kill()
        run.wait()
    until(lambda: not builds(), "the build is gone", seen=builds)
