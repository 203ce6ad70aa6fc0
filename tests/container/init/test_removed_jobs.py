"""Jobs of people who left people.yaml end by policy in a real Slurm; a file that lost everybody or many ends none."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from init.people.removed_jobs import RECORD
from tests.container.init_pods import PYTHON, Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

NAMES = [f"p{number}" for number in range(12)]
UIDS = {name: 5001 + number for number, name in enumerate(NAMES)}
# The pod's own run may read the record at the same time.
AGE = """
import os
from init.lean import replace
from init.people import keep, removed_jobs
from init.pod.pod import Pod
pod = Pod(os.environ)
with keep.hold_state(pod):
    losses = removed_jobs.read_record(pod)
    people = {uid: replace(loss, since=loss.since - 9000) for uid, loss in losses.people.items()}
    removed_jobs.write_record(pod, replace(losses, people=people))
"""


class Lab:
    def __init__(self, made: World) -> None:
        self.world = made
        self.file = made.mounts / "people" / "people.yaml"
        self.file.parent.mkdir()
        self.write(NAMES)
        made.configure({"slurm.conf": slurm_conf(accounting=False)})
        env = {"MINIVM_ACCOUNTING": "none", "MINIVM_REMOVED_JOBS": "cancel-pending", "MINIVM_REMOVED_JOBS_GRACE": "60"}
        self.controller: Pod = made.pod("controller", "slurm-controller", env=env)
        self.worker: Pod = made.pod("worker", "w1")

    def write(self, names: list[str]) -> None:
        users = [{"name": name, "uid": UIDS[name], "group": "lab"} for name in names]
        self.file.write_text(yaml.safe_dump({"groups": [{"name": "lab", "gid": 5000}], "users": users}))

    def submit(self, name: str, *options: str) -> str:
        command = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", *options, "--wrap", "sleep 900")
        return self.controller.run(*command, user=f"{UIDS[name]}:5000").strip()

    def state(self, job: str) -> str:
        return self.controller.run("squeue", "-h", "--states=all", "-o", "%T", "-j", job).strip()

    def wait_cancelled(self, job: str) -> None:
        until(lambda: {*self.state(job).split()} == {"CANCELLED"}, f"job {job} ends", seen=self.controller.account)

    def take(self) -> None:
        """Have the pod take over the file now, not only with the next periodic run."""
        self.controller.code(PYTHON, "-I", "-m", "init.people.keep")

    def apply(self, policy: str) -> tuple[int, str]:
        settings = [f"MINIVM_REMOVED_JOBS={policy}", "MINIVM_REMOVED_JOBS_GRACE=60"]
        return self.controller.code("env", *settings, PYTHON, "-I", "-m", "init.people.removed_jobs")

    def age(self) -> None:
        """Let more than the grace and the guard's hour pass for all who lost access."""
        self.controller.run(PYTHON, "-I", "-c", AGE)

    def lost(self) -> dict[str, bool]:
        data = json.loads(self.controller.run("cat", RECORD))
        return {name: waits for name, _, waits in data["people"].values()}

    def restore(self) -> None:
        self.write(NAMES)
        self.take()
        until(lambda: self.apply("cancel-pending")[0] == 0 and not self.lost(), "all are back")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with world(tmp_path_factory.mktemp("removed"), "removed") as made:
        lab = Lab(made)
        lab.controller.wait_ready()
        lab.worker.wait_ready()
        until(lambda: lab.controller.code("test", "-e", RECORD)[0] == 0, "the service has looked once")
        yield lab


def test_the_service_cancels_pending_jobs_after_the_grace_and_tells_why(lab: Lab) -> None:
    running = lab.submit("p0")
    held = lab.submit("p0", "--hold")
    array = lab.submit("p0", "--hold", "--array=1-40:3%2")
    site = lab.submit("p0", "--hold")
    other = lab.submit("p1", "--hold")
    until(lambda: lab.state(running) == "RUNNING", "the job runs")
    lab.controller.run("scontrol", "update", f"jobid={site}", "admincomment=ticket 7")
    lab.write(NAMES[1:])
    lab.take()
    assert lab.apply("cancel-pending")[0] == 0 and lab.lost() == {"p0": False}
    assert lab.state(held) == "PENDING", "the grace lets the person come back"
    lab.age()
    until(lambda: lab.state(held) == "CANCELLED", "the service cancels it", seen=lab.controller.account)
    until(lambda: {*lab.state(array).split()} == {"CANCELLED"}, "and all tasks")
    until(lambda: lab.state(site) == "CANCELLED", "and the one with a comment of the site")
    assert (lab.state(running), lab.state(other)) == ("RUNNING", "PENDING")
    shown = lab.controller.run("scontrol", "show", "job", held)
    assert "AdminComment=minivm: cancelled: p0 has no access since " in shown
    assert "AdminComment=ticket 7" in lab.controller.run("scontrol", "show", "job", site)

    def lines() -> list[str]:
        return [line for line in lab.controller.logs().splitlines() if "p0: cancelled by people.removedJobs" in line]

    until(lines, "it is told in the log", seen=lab.controller.account)
    (told,) = lines()
    array_tasks = f"{array}_[{','.join(map(str, range(1, 41, 3)))}]"
    assert {*told.rpartition(": ")[2].split(", ")} == {held, array_tasks, site}
    assert lab.apply("cancel")[0] == 0
    until(lambda: lab.state(running) == "CANCELLED", "`cancel` ends the running one too")
    assert "minivm: cancelled: p0" in lab.controller.run("scontrol", "show", "job", running)
    assert lab.apply("cancel") == (0, ""), "a second run has nothing to do"
    lab.restore()


@pytest.mark.parametrize("text", ["groups: []\nusers: []\n", "", "users: [", None])
def test_an_empty_broken_or_absent_file_cancels_nothing(lab: Lab, text: str | None) -> None:
    job = lab.submit("p2", "--hold")
    if text is None:
        lab.file.unlink()
    else:
        lab.file.write_text(text)
    lab.take()
    lab.apply("cancel")
    lab.age()
    code, said = lab.apply("cancel")
    if text and text.startswith("groups"):
        assert code == 1 and "people.yaml gives nobody access" in said
        lab.controller.run("minivm", "people", "confirm", "--all")
        lab.age()
        assert lab.apply("cancel")[0] == 1, "not even where an operator confirms it"
    else:
        assert not lab.lost()
    assert lab.state(job) == "PENDING"
    lab.restore()
    lab.controller.run("scancel", job)


def test_a_file_that_goes_away_cancels_nothing_of_people_who_left_before(lab: Lab) -> None:
    """An operator who removes a wrong file at night means nobody's jobs."""
    job = lab.submit("p3", "--hold")
    lab.write([name for name in NAMES if name != "p3"])
    lab.take()
    lab.apply("cancel")
    assert lab.lost() == {"p3": False}
    lab.file.unlink()
    lab.age()
    assert lab.apply("cancel") == (0, "")
    assert lab.state(job) == "PENDING"
    lab.restore()
    lab.controller.run("scancel", job)


def test_many_people_at_once_wait_for_a_word(lab: Lab) -> None:
    jobs = {name: lab.submit(name, "--hold") for name in NAMES[:4]}
    lab.write(NAMES[4:])
    lab.take()
    lab.apply("cancel")
    lab.age()
    code, said = lab.apply("cancel")
    assert code == 1 and "the jobs of 4 people stay: 4 lost access" in said and "confirm --all" in said
    assert {lab.state(job) for job in jobs.values()} == {"PENDING"}
    assert lab.controller.run("minivm", "people", "confirm").split() == NAMES[:4]
    lab.controller.run("minivm", "people", "confirm", "p1")
    lab.apply("cancel")
    assert lab.state(jobs["p1"]) == "PENDING", "the grace starts with the word"
    lab.age()
    lab.apply("cancel")
    until(lambda: lab.state(jobs["p1"]) == "CANCELLED", "the confirmed person's job ends")
    assert {lab.state(jobs[name]) for name in ("p0", "p2", "p3")} == {"PENDING"}
    lab.restore()
    assert lab.controller.code("minivm", "people", "confirm", "p0")[0] == 1
    lab.controller.run("scancel", *jobs.values())


def test_a_run_that_is_killed_anywhere_is_ended_by_the_next(lab: Lab) -> None:
    jobs = [lab.submit("p5", "--hold"), lab.submit("p5", "--hold", "--array=1-300")]
    other = lab.submit("p6", "--hold")
    lab.write([name for name in NAMES if name != "p5"])
    lab.take()
    lab.apply("cancel")
    lab.age()
    settings = ["MINIVM_REMOVED_JOBS=cancel", "MINIVM_REMOVED_JOBS_GRACE=60"]
    for tenths in range(1, 6):
        cut = ["timeout", "-s", "KILL", f"0.{tenths}"]
        lab.controller.code("env", *settings, *cut, PYTHON, "-I", "-m", "init.people.removed_jobs")
        assert lab.lost() == {"p5": False}
    assert lab.apply("cancel")[0] == 0
    for job in jobs:
        lab.wait_cancelled(job)
        assert "minivm: cancelled: p5" in lab.controller.run("scontrol", "show", "job", job)
    assert lab.state(other) == "PENDING"
    lab.restore()
    lab.controller.run("scancel", other)
