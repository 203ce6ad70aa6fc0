"""The fleet between a real API server and a real Slurm, continued: jobs that have their time, pods that are gone,
machines that are dead; each killed between any two changes, too."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.container.init_pods import Pod, world
from tests.fleet_world import stamp
from tests.kubernetes import programs, test_fleet
from tests.kubernetes.apiserver import api_server
from tests.kubernetes.test_fleet import PODS, READY, Both, Running
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

NAME, NODE = "w-0", "/api/v1/nodes/n-w-0"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
TAINT = "node.kubernetes.io/out-of-service"
# Connections there are neither made nor refused: see the fixture.
NOWHERE = "127.0.0.9"
SOON = {"gone": 1, "notReady": 1, "dead": 2, "leaveWithin": 2, "share": 0.4, "fencing": "act"}


class Rows(Both):
    """A third worker, the first of a StatefulSet."""

    worker: Pod

    def only(self) -> None:
        names = {"name": "minivm", "instance": "slurm", "component": "worker"}
        labels = {f"app.kubernetes.io/{key}": value for key, value in names.items()}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "w", "image": "x"}]}}
        spec = {"replicas": 1, "selector": {"matchLabels": labels}, "serviceName": "w", "template": template}
        self.api.ask("POST", SETS, {"metadata": {"name": "w", "labels": labels}, "spec": spec})
        self.api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n-w-0"}, "status": {"conditions": [READY]}})
        self.api.ask("POST", LEASES, {"metadata": {"name": "n-w-0"}, "spec": {"renewTime": f"{stamp(0)[:-1]}.000000Z"}})
        self.new_pod(NAME)

    def scale(self, count: int) -> None:
        self.api.merge(f"{SETS}/w", {"spec": {"replicas": count}})

    def there(self) -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            return "deletionTimestamp" not in self.api.ask("GET", f"{PODS}/{NAME}")["metadata"]
        return False

    def delete(self) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.ask("DELETE", f"{PODS}/{NAME}?gracePeriodSeconds=0")

    def known(self) -> bool:
        return "NodeName=w-0 " in self.controller.code("scontrol", "show", "nodes")[1]

    def state(self) -> str:
        return self.node(NAME)["state"]

    def submit(self, *words: str) -> str:
        more = ("--parsable", "-w", NAME, "--chdir=/tmp", *words, "--wrap", "sleep 7777")
        return self.controller.run("sbatch", *more, user="demo").strip()

    def job(self, number: str) -> str:
        return self.controller.run("squeue", "-h", "-j", number, "-o", "%t").strip()

    def idle(self) -> bool:
        return self.known() and self.node(NAME)["state"] == "IDLE"

    def tainted(self) -> bool:
        found = self.api.ask("GET", NODE)
        keys = {taint["key"] for taint in found["spec"].get("taints", [])}
        assert (TAINT in keys) == ("minivm.io/fenced" in found["metadata"].get("annotations", {})), "both or none"
        return TAINT in keys

    def says(self, status: str, ago: str) -> None:
        """What its kubelet, or the lack of it, makes of the Node."""
        ready = {**READY, "status": status, "lastTransitionTime": ago}
        addresses = [{"type": "InternalIP", "address": NOWHERE}]
        self.api.merge(f"{NODE}/status", {"status": {"conditions": [ready], "addresses": addresses}})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    directory = tmp_path_factory.mktemp("fleet")
    (directory / "slurm").mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # slurmctld looks after its nodes three times as often.
        patch.setattr(test_fleet, "JWT", (*test_fleet.JWT, "SlurmdTimeout=9"))
        api = stack.enter_context(api_server(programs.build(), directory))
        slurm = stack.enter_context(world(directory / "slurm", "fleetrows"))
        made = Rows(api, slurm, directory)
        made.worker = slurm.pod("worker", NAME, env={"MINIVM_ACCOUNTING": "none"})
        made.worker.add_user()
        made.worker.wait_ready(90)
        made.only()
        witness = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = {"daemonEndpoints": {"kubeletEndpoint": {"Port": witness.getsockname()[1]}}}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        api.merge("/api/v1/nodes/n-w1/status", {"status": {"conditions": [READY], "addresses": addresses, **port}})
        dead = stack.enter_context(socket.create_server((NOWHERE, 10250), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dead.getsockname())
        made.policy.write_text(json.dumps(SOON))
        yield made


@pytest.fixture(autouse=True)
def as_it_was(rows: Rows) -> Iterator[None]:
    yield
    rows.scale(1)
    rows.says("True", READY["lastTransitionTime"])
    if not rows.there():
        rows.delete()
        rows.new_pod(NAME)
    with rows.running():
        until(rows.idle, "it is as it was", seen=rows.log)
        until(lambda: not rows.tainted(), "without a taint")
        rows.quiet()


Step = tuple[Callable[[Rows], object], Callable[[Rows], bool]]


def leave(rows: Rows) -> None:
    rows.api.merge(f"{PODS}/{NAME}", {"metadata": {"annotations": {"minivm.io/leave": "new template"}}})


def comes(rows: Rows) -> None:
    rows.delete()
    rows.new_pod(NAME)


def dies(rows: Rows) -> None:
    rows.says("Unknown", READY["lastTransitionTime"])


def well(rows: Rows) -> None:
    rows.says("True", READY["lastTransitionTime"])
    comes(rows)


def fewer(rows: Rows) -> None:
    rows.scale(0)
    rows.delete()


def more(rows: Rows) -> None:
    rows.scale(1)
    comes(rows)


def all_well(rows: Rows) -> bool:
    return rows.idle() and not rows.tainted() and rows.shown(NAME) == "TakesJobs"


# What happens, and how it shows that all that follows was done.
STORIES: dict[str, tuple[Step, ...]] = {
    "leave": ((leave, lambda rows: not rows.there()), (comes, all_well)),
    "dead": ((dies, lambda rows: not rows.there()), (well, all_well)),
    "fewer": (
        (fewer, lambda rows: rows.state() == "IDLE+DRAIN"),
        (more, all_well),
    ),
}


def _done(fleet: Running, done: Callable[[Rows], bool], rows: Rows) -> bool:
    return fleet.there() and done(rows)


def told(rows: Rows, story: str, cut: int) -> int:
    """How often it was killed."""
    with rows.running(cut=cut) as fleet:
        for happens, done in STORIES[story]:
            happens(rows)
            until(partial(_done, fleet, done, rows), f"all is done: {story}", within=90, seen=rows.log)
        return fleet.killed


def test_jobs_of_a_pod_that_is_to_go_have_their_time_and_then_run_elsewhere(rows: Rows) -> None:
    job = rows.submit()
    until(lambda: rows.job(job) == "R", "the job runs")
    with rows.running():
        leave(rows)
        until(lambda: rows.state() == "DOWN+DRAIN", "the node is set down", seen=rows.log)
        assert rows.reason(NAME).startswith("minivm: fleet: deadline+leave: its jobs had 2 s, new template")
        until(lambda: rows.job(job) == "PD", "its job waits for the next", seen=rows.log)
        until(lambda: not rows.there(), "then the pod goes", seen=rows.log)
        comes(rows)
        until(lambda: rows.job(job) == "R", "and it runs on the next", within=180, seen=rows.log)
        assert rows.reason(NAME) == ""
    rows.controller.run("scancel", job)


def test_a_pod_that_is_gone_is_set_down_and_its_record_goes_where_its_name_does_not_come_back(rows: Rows) -> None:
    job = rows.submit("--requeue")
    until(lambda: rows.job(job) == "R", "the job runs")
    with rows.running():
        rows.delete()
        until(lambda: rows.reason(NAME) == "minivm: fleet: gone: its pod is gone", "drained", seen=rows.log)
        assert rows.job(job) == "R", "its slurmd answers: its job may run"
        rows.worker.container.kill()
        until(lambda: rows.state() == "DOWN+DRAIN", "then set down", within=120, seen=rows.log)
        until(lambda: rows.job(job) == "PD", "its job runs elsewhere, if it may", seen=rows.log)
        rows.scale(0)
        until(lambda: "StatefulSet" not in rows.log(), "nothing is told of sets")
        rows.controller.run("scancel", job)
        until(lambda: not rows.known(), "its record goes", within=120, seen=rows.log)
        rows.scale(1)
        rows.worker.container.start()
        rows.worker.wait_ready(90)
        rows.worker.add_user()
        rows.new_pod(NAME)
        until(rows.idle, "it is back", seen=rows.log)


def test_a_dead_machine_is_given_up_and_taken_back(rows: Rows) -> None:
    job = rows.submit()
    until(lambda: rows.job(job) == "R", "the job runs")
    with rows.running():
        dies(rows)
        until(lambda: rows.tainted(), "its Node is out of service", seen=rows.log)
        until(lambda: rows.state() == "DOWN+DRAIN", "its worker is down", seen=rows.log)
        assert "dead" in rows.reason(NAME)
        until(lambda: rows.job(job) == "PD", "its job runs elsewhere, if it may", seen=rows.log)
        until(lambda: not rows.there(), "its pod is deleted", seen=rows.log)
        well(rows)
        until(lambda: not rows.tainted(), "it is taken back", seen=rows.log)
        until(lambda: rows.job(job) == "R", "and its worker takes jobs", within=180, seen=rows.log)
    rows.controller.run("scancel", job)


def test_a_machine_that_may_not_be_given_up_is_told(rows: Rows) -> None:
    rows.policy.write_text(json.dumps({**SOON, "fencing": "propose"}))
    dies(rows)
    said = rows.ask("why", "n-w-0")
    rows.policy.write_text(json.dumps(SOON))
    assert "`act` would give it up" in said
    assert f"kubectl taint nodes n-w-0 {TAINT}=" in said
    assert (rows.tainted(), rows.there()) == (False, True)


@pytest.mark.parametrize("story", STORIES)
def test_killed_before_any_change_of_a_story_it_ends_the_same(rows: Rows, story: str) -> None:
    """Again and again, each time one change later, until there is no such change."""
    for cut in range(1, 40):
        if not told(rows, story, cut):
            assert cut > 4, "a story in which little is done shows little"
            return
        with rows.running():
            until(partial(all_well, rows), "it is as it was", within=90, seen=rows.log)
    raise AssertionError("it never ends")
