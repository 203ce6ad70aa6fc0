"""Two controllers on two machines: switched on for a cluster with jobs, one lost in several ways, one again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.render import CHART
from cluster.values import merge
from tests.kubernetes import network
from tests.kubernetes.kubectl import Kubernetes, Object
from tests.kubernetes.lab import Lab
from tests.kubernetes.world import SMALL, Release
from tests.pages import blocks
from tests.reader import ROOT, follow, programs
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)
PAGE = ROOT / "docs/how-to/two-controllers.md"
SLICE = "slurm-slurmctld-active"
STATE = "/var/spool/slurmctld"
# slurmctld answers sbatch before it has saved the job's record, at most every 5 s, and looks each second.
UNSAVED_S = 7.0
AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
# Submits held jobs one after the other, and writes down the number and the time of each that slurmctld has taken.
SUBMITTER = """
import os, subprocess, time
out = open("/tmp/taken", "w", buffering=1)
while not os.path.exists("/tmp/enough"):
    command = ["sbatch", "--parsable", "-H", "-D", "/tmp", "-o", "/dev/null", "--wrap", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        out.write(f"{done.stdout.strip()} {time.time():.2f}\\n")
    time.sleep(0.2)
"""


class Pair(Release):
    def acting(self) -> str:
        """Return the controller to which the Service leads, once it says so itself and its peer stands by."""

        def found() -> str:
            done = self.kubernetes.attempt("-n", self.namespace, "get", "endpointslice", SLICE,
                                           "-o", "jsonpath={.endpoints[0].targetRef.name}")  # fmt: skip
            name = done.stdout.removeprefix(f"{self.name}-")
            return name if name and self.turn(name).startswith("active") else ""

        return until(found, "a controller acts", within=180, seen=self.turns)

    def both(self) -> tuple[str, str]:
        """Return the controller that acts and the one that stands by, which are both ready."""
        self.wait_ready(within=300)
        acts = self.acting()
        (stands_by,) = {"controller-0", "controller-1"} - {acts}
        until(lambda: self.turn(stands_by).startswith("standby"), "the other one stands by", seen=self.turns)
        return acts, stands_by

    def turn(self, pod: str) -> str:
        words = ("-n", self.namespace, "exec", f"{self.name}-{pod}", "--", "minivm", "status", "--json")
        try:
            text = self.kubernetes.attempt(*words, timeout=30).stdout
        except subprocess.TimeoutExpired:
            return ""  # it is looked at again
        return text.partition('"turn": "')[2].partition('"')[0]

    def turns(self) -> str:
        said = {pod: self.turn(pod) for pod in ("controller-0", "controller-1")}
        return f"{said}\n{self.why()}"

    def slurm(self, *command: str) -> str:
        return self.run(self.acting() if "controller-1" in self.wanted() else "controller-0", *command).strip()

    def jobs(self) -> set[str]:
        words = (
            "-n",
            self.namespace,
            "exec",
            f"{self.name}-login-0",
            "--",
            "timeout",
            "20",
            "squeue",
            "-h",
            "-o",
            "%A",
        )

        def asked() -> str:
            done = self.kubernetes.attempt(*words)
            return f"{done.stdout}\n" if done.returncode == 0 else ""

        return set(until(asked, "squeue answers", seen=self.why).split())

    def taken(self) -> list[tuple[str, float]]:
        lines = [line.split() for line in self.run("login-0", "sh", "-c", "cat /tmp/taken || true").splitlines()]
        return [(line[0], float(line[1])) for line in lines if len(line) == 2]


@pytest.fixture(scope="module")
def pair(kubernetes: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A second controller, switched on as the page says for a cluster that has jobs."""
    folder = tmp_path_factory.mktemp("pair")
    controller = {"app.kubernetes.io/component": "controller", "app.kubernetes.io/instance": "slurm"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": controller}}
    away = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    over = {"accounting": {"mode": "none"}, "login": {**SMALL, "affinity": away}}
    made = Pair(kubernetes, folder, namespace="slurm", over=over)
    made.install()
    try:
        made.wait_ready(within=300)
        held = made.slurm_as_user("sbatch", "--parsable", "-H", "-D", "/tmp", "-o", "/dev/null", "--wrap", "true")
        runs = made.slurm_as_user("sbatch", "--parsable", "-D", "/tmp", "-o", "/dev/null", "--wrap", "sleep 3600")
        made.wait_for(runs, "RUNNING")
        made.wait_saved(runs)
        for claim, why in (
            ("slurm-state", "move the state first"),
            ("state-slurm-controller-0", "needs ReadWriteMany"),
        ):
            with pytest.raises(AssertionError, match=why):
                made.helm("upgrade", str(CHART), values=merge(made.values(), two(claim)))
        switch_on(made, folder)
        assert made.both()[0] == "controller-0"
        assert (made.state(runs), made.restarts(runs)) == ("RUNNING", 0) and {held, runs} <= made.jobs()
        made.slurm("scancel", runs)
        yield made
    finally:
        made.shut()
        made.uninstall()
        kubernetes("delete", "namespace", made.namespace)


def as_written(release: Pair, folder: Path, *, hand_over: bool) -> str:
    """Follow the page's commands: those of the hand-over, or those that switch it on."""
    directory = programs(folder / "bin")
    (directory / "kubectl").write_text(f'#!/bin/sh\nexec {" ".join(release.kubernetes.client)} "$@"\n')
    env = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}
    wanted = [block for block in blocks(PAGE) if block.needs and ("hand-over" in block.text) is hand_over]
    return "".join(follow(block, env, folder) for block in wanted)


def switch_on(release: Pair, folder: Path) -> None:
    as_written(release, folder, hand_over=False)
    release.upgrade(**two("slurm-state"))


def two(claim: str) -> Object:
    return {"controller": {"replicas": 2, "persistence": {"existingClaim": claim}}}


def test_they_are_on_two_machines_and_may_write_one_endpointslice(pair: Pair) -> None:
    assert pair.node_of("controller-0") != pair.node_of("controller-1")
    acts, stands_by = pair.both()
    assert f"{pair.name}-{acts} has term" in pair.run(stands_by, "minivm", "status")
    assert pair.kubernetes.attempt(
        "-n", pair.namespace, "exec", f"{pair.name}-{stands_by}", "--", "pgrep", "slurmctld"
    ).stdout == ""  # fmt: skip
    account = f"--as=system:serviceaccount:{pair.namespace}:{pair.name}-controller"
    answers = []
    for words in (("patch", f"endpointslice/{SLICE}"), ("patch", "endpointslice/other"), ("create", "endpointslice"),
                  ("patch", "service/slurm-slurmctld")):  # fmt: skip
        done = pair.kubernetes.attempt("-n", pair.namespace, "auth", "can-i", *words, account)
        answers.append(done.stdout.strip())
    assert answers == ["yes", "no", "no", "no"]


def gone_by(how: str, pair: Pair, acts: str, lab: Lab | None, folder: Path) -> None:
    if how == "handed over":
        print(as_written(pair, folder, hand_over=True))
    elif how == "deleted":
        pair.kubectl("delete", "pod", f"{pair.name}-{acts}", "--wait=false")
    elif how == "rolled":
        pair.kubectl("rollout", "restart", f"statefulset/{pair.name}-controller")
        pair.kubectl("rollout", "status", f"statefulset/{pair.name}-controller", "--timeout=240s")
    elif how == "lease killed":
        pair.run(acts, "pkill", "-KILL", "-f", "init.helpers.lease")
    else:
        assert lab
        node = pair.node_of(acts)
        network.plug(lab.node(node), "down")
        lab.power_cut(node)


@pytest.mark.parametrize("how", ["handed over", "deleted", "rolled", "lease killed", "machine dies"])
def test_submissions_go_on_and_no_saved_job_is_lost(pair: Pair, how: str, tmp_path: Path) -> None:
    lab = pair.kubernetes.lab
    if how == "machine dies" and not lab:
        pytest.skip("these machines are not ours to break")
    acts, stands_by = pair.both()
    before, node = pair.jobs(), pair.node_of(acts)
    assert pair.node_of("login-0") != node
    pair.run("login-0", "rm", "-f", "/tmp/enough", "/tmp/taken")
    pair.run("login-0", "setsid", "-f", *AS_NOBODY, "sh", "-c", 'exec python3 -c "$0" > /dev/null 2>&1', SUBMITTER)
    until(lambda: len(pair.taken()) > 3, "jobs are taken")
    time.sleep(UNSAVED_S)
    gone = time.time()
    gone_by(how, pair, acts, lab, tmp_path)
    try:
        until(lambda: pair.taken()[-1][1] > gone + 15, "jobs are taken again", within=180, seen=pair.turns)
        if how == "machine dies":
            assert pair.acting() == stands_by
        pair.run("login-0", "touch", "/tmp/enough")
        taken, jobs = pair.taken(), pair.jobs()
    finally:
        pair.run("login-0", "touch", "/tmp/enough")
        if how == "machine dies" and lab:
            network.plug(lab.node(node), "up")
            lab.power_back(node)
    gap = max(later - earlier for earlier, later in pairwise(at for _, at in taken))
    unsaved = {job for job, at in taken if gone - UNSAVED_S < at <= gone + gap}
    lost = {job for job, _ in taken if job not in jobs}
    twice = {job for job, _ in taken if [other for other, _ in taken].count(job) > 1}
    print(
        f"{how}: {len(taken)} jobs taken, {gap:.1f} s without a submission, {len(lost)} lost before they were saved,"
        f" {len(twice)} of their numbers given again"
    )
    assert before <= jobs and lost <= unsaved and not twice
    if how in ("handed over", "deleted", "rolled"):
        assert not lost
    pair.both()


def test_one_again_keeps_every_job_and_its_address(pair: Pair) -> None:
    before = pair.jobs()
    pair.upgrade(controller={"replicas": 1})
    until(lambda: set(pair.pods()) & {"controller-1"} == set(), "the second one is gone", within=180, seen=pair.why)
    until(lambda: not pair.kubernetes.attempt("-n", pair.namespace, "get", "endpointslice", SLICE).stdout,
          "its EndpointSlice is gone", within=180, seen=pair.why)  # fmt: skip
    pair.wait_ready(within=300)
    assert before <= pair.jobs()
