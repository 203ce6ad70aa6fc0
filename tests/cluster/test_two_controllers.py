"""Two controllers of which one acts: a second one is switched on and off, and the active one goes in several ways."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from cluster import report
from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

VALUES = {"accounting": {"mode": "none"}}
STATE = "/var/spool/slurmctld"
# Submits held jobs one after the other, and writes down the number and the time of each that slurmctld has taken.
SUBMITTER = """
import os, subprocess, time
out = open(os.path.expanduser("~/taken"), "w", buffering=1)
while not os.path.exists(os.path.expanduser("~/enough")):
    command = ["sbatch", "--parsable", "-H", "-o", "/dev/null", "--wrap", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        out.write(f"{done.stdout.strip()} {time.time():.2f}\\n")
    time.sleep(0.1)
"""


class Pair:
    def __init__(self, world: World) -> None:
        self.world, self.ann = world, Researcher(world, "alice")

    def turns(self) -> dict[str, str]:
        running = self.world.cluster.kubelet.list_pods()
        return {
            name: report.read_turn(item) for name, item in sorted(running.items())
            if item.role == "controller" and item.running
        }  # fmt: skip

    def active(self) -> str:
        """Return the pod that acts, once there is exactly one, and its peer stands by."""

        def found() -> str:
            turns = self.turns()
            active = [name for name, text in turns.items() if text.startswith("active")]
            standby = [name for name, text in turns.items() if text.startswith("standby")]
            return active[0] if len(active) == 1 and len(standby) == 1 else ""

        return until(found, "one controller acts, one stands by", seen=self.turns)

    def jobs(self) -> set[str]:
        def asked() -> str:
            code, text = self.world.cluster.exec("slurm-login-0", ["timeout", "20", "squeue", "-h", "-o", "%A"])
            return f"{text}\n" if code == 0 else ""

        return set(until(asked, "squeue answers").split())

    def brought_back(self) -> set[str]:
        """Return the first numbers of the jobs that were submitted again."""
        command = ["timeout", "20", "squeue", "-h", "-O", "ADMIN_COMMENT:|"]
        text = self.world.cluster.exec("slurm-login-0", command)[1]
        return set(re.findall(r"minivm: job (\d+) again", text))

    def saved(self) -> float:
        """Return a time, seconds ago, before which slurmctld answered for no job that it has not saved.

        It answers sbatch first and saves the job within seconds: what a file holds for certain was there when the file
        before it was written.
        """

        def written() -> float:
            # Each term has a directory of its own. The file is absent while it is replaced.
            look = f"echo 0; stat -c %.Y {STATE}/term-*/job_state || true"
            return max(map(float, self.world.run(self.active(), "sh", "-c", f"({look}) 2>/dev/null").split()))

        first = until(written, "slurmctld has saved jobs")
        until(lambda: written() > first, "slurmctld has saved jobs again")
        return first

    def taken(self) -> dict[str, float]:
        lines = [line.split() for line in self.ann("cat taken").splitlines()]
        found = {line[0]: float(line[1]) for line in lines if len(line) == 2}
        assert len(found) == sum(len(line) == 2 for line in lines), "a number was given again"
        return found

    def terms(self) -> dict[int, str]:
        """Return the holder of each term that the volume still knows."""
        text = self.world.run(self.active(), "sh", "-c", f"cd {STATE}/lease && grep -H . term-*")
        return {int(number): json.loads(line)["holder"] for number, line in re.findall(r"term-(\d+):(\{.*?\})", text)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with small_cluster(DockerEngine().client, f"{NAME}-two", tmp_path_factory.mktemp("two"), VALUES) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


@pytest.fixture(scope="module")
def pair(alone: World) -> Pair:
    """A second controller, switched on for a cluster that has jobs."""
    ann = Researcher(alone, "alice")
    held = ann.submit("-H", "-o", "/dev/null", script="true")
    runs = ann.submit("-o", "/dev/null", script="sleep 3600")
    ann.wait_for(runs, "RUNNING")
    alone.cluster.options = replace(alone.cluster.options, controllers=2)
    alone.cluster.up(timeout=240)
    alone.manifests = alone.cluster.manifests()
    made = Pair(alone)
    assert {held, runs} <= made.jobs()
    assert made.active() == "slurm-controller-0"
    return made


def test_the_second_one_stands_by_and_both_are_ready(pair: Pair) -> None:
    active = pair.active()
    pair.world.wait_ready()
    rows = {row.pod: row for row in pair.world.cluster.status() if row.role == "controller"}
    assert {row.slurm for row in rows.values()} == {"standby", rows[active].slurm}
    assert re.fullmatch(r"active, term \d+", rows[active].slurm)
    (standby,) = set(rows) - {active}
    assert pair.world.cluster.exec(standby, ["pgrep", "slurmctld"])[0] == 1
    assert "standby" in pair.world.run(standby, "minivm", "status")


def gone_by(how: str, pair: Pair, active: str) -> None:
    cluster = pair.world.cluster
    if how == "handed over":
        print(pair.world.run(active, "minivm", "hand-over"))
    elif how == "deleted":
        cluster.delete(active)
    elif how == "killed":
        cluster.delete(active, force=True)
    elif how == "slurmctld's lease is killed":
        pair.world.run(active, "pkill", "-KILL", "-f", "init.helpers.lease")
    else:
        api = cluster.kubelet.api
        container = pair.world.running(active).container
        api.pause(container)
        try:
            until(lambda: any(text.startswith("active") for name, text in pair.turns().items() if name != active),
                  "the other one acts", seen=pair.turns)  # fmt: skip
        finally:
            api.unpause(container)


@pytest.mark.parametrize("how", ["handed over", "deleted", "killed", "slurmctld's lease is killed", "stopped"])
def test_submissions_go_on_and_no_saved_job_is_lost(pair: Pair, how: str) -> None:
    before, active = pair.jobs(), pair.active()
    start = "cat > submit.py; rm -f enough; : > taken; setsid -f python3 submit.py < /dev/null > /dev/null 2>&1"
    pair.ann(start, stdin=SUBMITTER)
    until(lambda: len(pair.taken()) > 3, "jobs are taken")
    saved = pair.saved()
    gone = time.time()
    gone_by(how, pair, active)
    pair.active()
    acts = time.time()
    until(lambda: max(pair.taken().values(), default=0) > gone + 12, "jobs are taken again", seen=pair.turns)
    pair.ann("touch enough")
    taken, jobs = pair.taken(), pair.jobs()
    times = sorted(taken.values())
    gap = max(later - earlier for earlier, later in pairwise(times))
    lost = {job for job in taken if job not in jobs}
    unsaved = {job for job in lost if saved < taken[job] <= acts}
    print(f"{how}: {len(taken)} jobs taken, {gap:.1f} s without a submission, {len(lost)} lost before they were saved")
    assert lost == unsaved and before <= jobs
    until(lambda: lost <= pair.brought_back(), "all of them are back", seen=lambda: lost - pair.brought_back())
    assert len(set(pair.terms())) == len(pair.terms())
    if how in ("deleted", "handed over"):
        assert not lost


def refused(pair: Pair, pod: str, *words: str) -> str:
    code, text = pair.world.cluster.exec(pod, ["minivm", "hand-over", *words])
    assert code == 1, text
    return text


def test_a_hand_over_without_a_healthy_standby_is_refused_and_changes_nothing(pair: Pair) -> None:
    active = pair.active()
    (stands_by,) = set(pair.turns()) - {active}
    before = pair.terms()
    assert f"{stands_by} does not act: {active} has term" in refused(pair, stands_by)
    assert "slurm-controller-7 has never stood by" in refused(pair, active, "--to", "slurm-controller-7")
    code, text = pair.world.cluster.exec(active, ["minivm", "hand-over"], user="nobody")
    assert code == 1 and "run this as root" in text
    pair.world.run(stands_by, "minivm", "stop", "sssd")
    try:
        report = ("cat", f"{STATE}/lease/standby-{stands_by}")
        until(lambda: "sssd" in pair.world.run(active, *report), "the standby reports it")
        assert "sssd" in refused(pair, active)
    finally:
        pair.world.run(stands_by, "minivm", "start", "sssd")
    pair.world.run(stands_by, "pkill", "-STOP", "-f", "init.helpers.lease")
    assert f"{stands_by} does not report" in refused(pair, active)
    pair.world.run(stands_by, "pkill", "-CONT", "-f", "init.helpers.lease")
    assert pair.terms() == before and pair.active() == active


def test_a_hand_over_that_is_killed_at_any_moment_loses_nothing(pair: Pair) -> None:
    held = pair.ann.submit("-H", "-o", "/dev/null", script="true")
    for seconds in ("0.5", "1.2", "2.0", "2.5", "3.0", "3.5", "4.0"):
        active = pair.active()
        pair.world.cluster.exec(active, ["timeout", "-s", "KILL", seconds, "minivm", "hand-over"])
        print(f"killed after {seconds} s: {active}, then {pair.active()}")
        assert held in pair.jobs()
    assert len(set(pair.terms())) == len(pair.terms())


def test_one_again_keeps_every_job(pair: Pair) -> None:
    before = pair.jobs()
    cluster = pair.world.cluster
    cluster.options = replace(cluster.options, controllers=1)
    cluster.up(timeout=240)
    pair.world.manifests = cluster.manifests()
    assert before <= pair.jobs()
    pair.world.cluster.delete("slurm-controller-0")
    pair.world.wait_ready("slurm-controller-0")
    assert before <= pair.jobs()
