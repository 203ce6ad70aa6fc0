"""Each way in which a worker's pod goes and comes back: what others say of its node stays, what was ours is lifted.

One cluster for the module; the tests run in the order in which they stand, and each leaves the cluster whole.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest

from tests.container.init_pods import PYTHON, Pod, World, image_of, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ENV = {"MINIVM_ACCOUNTING": "none"}
VERDICT = "minivm: gpu_ecc[rma]@zero GPU-1: 3 uncorrected errors"
KEPT_BACK = timedelta(seconds=120)
HELD = {"w1": "fan 3 is loud, ask Ann x=1", "w2": VERDICT}


class Cluster:
    def __init__(self, made: World) -> None:
        self.world = made
        another = io.BytesIO(f"FROM {image_of('worker')}\nLABEL minivm-test=rolled\n".encode())
        self.next_image = str(made.client.images.build(fileobj=another, rm=True)[0].id)
        self.configure()
        self.controller = made.pod("controller", "slurm-controller", env=ENV)
        self.workers = {name: made.pod("worker", name, env=ENV) for name in ("w1", "w2")}
        for pod in (self.controller, *self.workers.values()):
            pod.add_user()

    def configure(self, *lines: str) -> None:
        self.world.configure({"slurm.conf": slurm_conf(*lines, accounting=False)})

    def slurm(self, *argv: str, user: str = "root") -> str:
        return self.controller.run(*argv, user=user)

    def submit(self, *options: str) -> str:
        batch = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--requeue")
        return self.slurm(*batch, *options, "--wrap", "sleep 7777", user="demo").strip()

    def job(self, job: str, key: str = "JobState") -> str:
        words = self.slurm("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)[key]

    def wait_job(self, job: str, state: str) -> None:
        until(lambda: self.job(job) == state, f"job {job} is {state}", seen=lambda: self.slurm("squeue"))

    def node(self, name: str, form: str = "%T") -> str:
        return self.slurm("sinfo", "--noheader", "--nodes", name, "--format", form).strip()

    def held(self, name: str) -> str:
        """Why, by whom and since when."""
        return self.node(name, "%E|%u|%H")

    def wait_node(self, name: str, state: str) -> None:
        until(lambda: self.node(name) == state, f"{name} is {state}", seen=lambda: self.node(name, "%T|%E"))

    def cancel(self) -> None:
        self.slurm("scancel", "--user=demo")
        until(lambda: not self.slurm("squeue", "--noheader").strip(), "no job is left")

    def replaced(self, name: str, *, image: str = "", env: dict[str, str] | None = None) -> Pod:
        """Replace the container of that name by a new one at another address."""
        old = self.workers[name]
        old.remove()
        self.world.pods.remove(old)
        self.workers[name] = self.world.pod("worker", name, env={**ENV, **(env or {})}, image=image)
        self.workers[name].add_user()
        return self.workers[name]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("returns"), "returns") as made:
        found = Cluster(made)
        for pod in (found.controller, *found.workers.values()):
            pod.wait_ready()
        yield found
        for pod in found.workers.values():
            pod.remove()
        made.client.images.remove(found.next_image)


@pytest.fixture
def squatter(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Occupy addresses that have become free, so that a returning pod gets another."""
    taken: list[Pod] = []
    yield lambda: taken.append(cluster.world.pod("login", f"squatter{len(taken)}", env=ENV))
    for pod in taken:
        pod.remove()
        cluster.world.pods.remove(pod)


def stop(cluster: Cluster, name: str) -> None:
    """TERM, as the kubelet sends it."""
    container = cluster.workers[name].container
    container.stop(timeout=90)  # a busy machine may need more than the grace of 20 s
    container.reload()
    assert container.attrs["State"]["ExitCode"] == 0, cluster.workers[name].logs()[-3000:]


def started_again(cluster: Cluster, name: str) -> None:
    stop(cluster, name)
    cluster.workers[name].container.start()


def killed(cluster: Cluster, name: str) -> None:
    cluster.workers[name].container.kill()
    cluster.replaced(name)


def rolled(cluster: Cluster, name: str) -> None:
    """Delete the pod, and make another one of another image."""
    stop(cluster, name)
    cluster.replaced(name, image=cluster.next_image)


@pytest.mark.parametrize("goes", [started_again, killed, rolled])
def test_what_others_hold_stays_held_with_reason_author_and_time(
    cluster: Cluster, goes: Callable[[Cluster, str], None]
) -> None:
    """A person's drain and that of a verdict which only a person ends, on nodes with a job."""
    jobs = {name: cluster.submit("--nodelist", name) for name in HELD}
    for name, job in jobs.items():
        cluster.wait_job(job, "RUNNING")
        # Not root, who comes back as the pod.
        cluster.slurm("scontrol", "update", f"nodename={name}", "state=drain", f"reason={HELD[name]}", user="slurm")
    before = {name: cluster.held(name) for name in HELD}
    assert all(before[name].startswith(f"{HELD[name]}|slurm|") for name in HELD)
    for name in HELD:
        goes(cluster, name)
    for name, job in jobs.items():
        cluster.workers[name].wait_ready()
        cluster.wait_node(name, "drained")
        assert cluster.held(name) == before[name]
        assert (cluster.job(job), cluster.job(job, "Restarts")) == ("PENDING", "1"), "requeued, and not started there"
    cluster.cancel()
    for name in HELD:
        cluster.slurm("scontrol", "update", f"nodename={name}", "state=resume")
        cluster.wait_node(name, "idle")


@pytest.mark.parametrize("goes", [started_again, killed, rolled])
def test_what_was_ours_is_lifted_and_jobs_run_again(cluster: Cluster, goes: Callable[[Cluster, str], None]) -> None:
    job = cluster.submit("--nodelist=w1")
    cluster.wait_job(job, "RUNNING")
    goes(cluster, "w1")
    cluster.workers["w1"].wait_ready()
    # Slurm keeps a requeued job back for two minutes, so that what it still has to say to the node of the run before is
    # not said to the next. Nobody waits for that here, and nobody cuts it short: another job shows that the node works.
    until(
        lambda: cluster.node("w1") in ("idle", "mixed", "allocated"), "w1 takes jobs", seen=lambda: cluster.held("w1")
    )
    another = cluster.submit("--nodelist=w1")
    cluster.wait_job(another, "RUNNING")
    # On a busy machine the two minutes may be over by now.
    assert cluster.job(job, "Restarts") == "1" and cluster.job(job) in ("PENDING", "RUNNING")
    again, since = (datetime.fromisoformat(cluster.job(job, key)) for key in ("EligibleTime", "SubmitTime"))
    assert again - since >= KEPT_BACK
    cluster.cancel()
    cluster.wait_node("w1", "idle")


def test_a_stopped_node_is_drained_with_our_reason_and_its_own_jobs_wait_for_it(
    cluster: Cluster, squatter: Callable[[], None]
) -> None:
    """slurmctld ends a job that names a node without a record, at its next reconfigure."""
    stop(cluster, "w1")
    assert cluster.held("w1").startswith("minivm: pod stops|root|")
    assert cluster.node("w1").startswith("drained")
    job = cluster.submit("--nodelist=w1")
    cluster.slurm("scontrol", "reconfigure")
    until(lambda: cluster.controller.code("scontrol", "ping")[0] == 0, "slurmctld answers")
    cluster.controller.run("minivm", "restart", "slurmctld")
    cluster.controller.wait_ready()
    assert cluster.job(job) == "PENDING"
    squatter()
    cluster.replaced("w1").wait_ready()
    cluster.wait_job(job, "RUNNING")
    cluster.cancel()


def test_a_drain_set_while_the_pod_is_leaving_is_not_overwritten(cluster: Cluster) -> None:
    # With a short grace the drain may end the job before the test does.
    worker = cluster.replaced("w1", env={"MINIVM_GRACE_SECONDS": "300"})
    worker.wait_ready()
    cluster.wait_node("w1", "idle")
    job = cluster.submit("--nodelist=w1")
    cluster.wait_job(job, "RUNNING")
    worker.run("minivm", "drain", "--no-wait")
    until(lambda: "waiting for 1 job" in worker.status()["drain"], "it waits for the job")
    cluster.slurm("scontrol", "update", "nodename=w1", "state=drain", "reason=I want to look", user="slurm")
    cluster.cancel()
    until(lambda: worker.status()["drain"] == "drained", "the drain is over")
    assert cluster.held("w1").startswith("I want to look|slurm|")
    code, text = worker.code("minivm", "resume")
    assert code == 1 and "w1 stays drained in Slurm, by slurm@" in text and "I want to look" in text
    assert cluster.held("w1").startswith("I want to look|slurm|") and cluster.node("w1") == "drained"
    cluster.slurm("scontrol", "update", "nodename=w1", "state=resume")
    cluster.wait_node("w1", "idle")


def test_a_controller_that_goes_while_jobs_are_waited_for_costs_none_of_them(cluster: Cluster) -> None:
    """Replace both pods at once: the worker gives its jobs their time, and asks again."""
    worker = cluster.replaced("w1", env={"MINIVM_GRACE_SECONDS": "300"})
    worker.wait_ready()
    cluster.wait_node("w1", "idle")
    job = cluster.submit("--nodelist=w1")
    cluster.wait_job(job, "RUNNING")
    worker.run("minivm", "drain", "--no-wait")
    until(lambda: "waiting for 1 job" in worker.status()["drain"], "it waits for the job")
    cluster.controller.run("minivm", "stop", "slurmctld")
    until(
        lambda: "jobs run here, so the drain asks slurmctld again" in worker.status()["drain"],
        "it has missed slurmctld",
        seen=lambda: worker.status()["drain"],
    )
    cluster.controller.run("minivm", "start", "slurmctld")
    cluster.controller.wait_ready()
    until(lambda: "waiting for 1 job" in worker.status()["drain"], "it waits for the job again")
    assert (cluster.job(job), cluster.job(job, "Restarts")) == ("RUNNING", "0")
    cluster.cancel()
    until(lambda: worker.status()["drain"] == "drained", "the drain is over")
    worker.run("minivm", "resume")
    cluster.wait_node("w1", "idle")


def test_a_job_that_is_over_is_not_run_once_more_when_its_node_leaves(cluster: Cluster) -> None:
    """Its epilog takes longer than the drain may, and slurmctld would requeue a job whose program has ended."""
    # The pod of the test before has a grace of minutes, which the drain would use up.
    worker, epilog = cluster.replaced("w1"), "#!/bin/sh\nwhile [ -e /tmp/held ]; do sleep 0.1; done\n"
    worker.wait_ready()
    cluster.wait_node("w1", "idle")
    for pod in cluster.workers.values():
        pod.run("sh", "-c", f"printf '{epilog}' > /tmp/epilog; chmod 755 /tmp/epilog; touch /tmp/held")
    before = worker.service("slurmd")["pid"]
    cluster.configure("Epilog=/tmp/epilog")
    until(lambda: worker.code("grep", "^Epilog=", "/run/slurm/conf/slurm.conf")[0] == 0, "the pod has an epilog")
    until(lambda: (view := worker.service("slurmd"))["ready"] and view["pid"] != before, "slurmd has it, too")
    try:
        job = cluster.submit("--nodelist=w1")
        cluster.wait_job(job, "RUNNING")
        cluster.slurm("scancel", "--batch", "--signal=KILL", job)
        cluster.wait_job(job, "COMPLETING")
        # It may end between the look at all of the node's jobs and the word about it.
        free = f"from init.slurm.client import free; free({{{job!r}: 'R'}}, 'slurm-controller:6817', print)"
        worker.run(PYTHON, "-I", "-c", free)
        # Down ends what is left of it.
        worker.run("minivm", "drain")
        assert (cluster.job(job), cluster.job(job, "Restarts")) == ("FAILED", "0")
    finally:
        for pod in cluster.workers.values():
            pod.run("rm", "-f", "/tmp/held")
        cluster.configure()

    def has_none() -> bool:
        code, text = cluster.controller.code("scontrol", "show", "config")
        return code == 0 and "/tmp/epilog" not in text

    until(has_none, "slurmctld has no epilog any more")
    worker.run("minivm", "resume")
    cluster.wait_node("w1", "idle")


def test_a_leaving_node_takes_no_member_of_an_array_from_another_node(cluster: Cluster) -> None:
    """The last member has the array's number, which means all of them to slurmctld."""
    job = cluster.submit("--array=0-1", "--exclusive", "--no-requeue")

    def runs() -> dict[str, str]:
        shown = cluster.slurm("squeue", "--noheader", "--states=R", "--format=%N %i").splitlines()
        return dict(line.split() for line in shown)

    until(lambda: runs().keys() == {"w1", "w2"}, "a member runs on each node")
    last = next(node for node, member in runs().items() if member == f"{job}_1")
    (other,) = cluster.workers.keys() - {last}
    cluster.workers[last].run("minivm", "drain")
    try:
        assert runs() == {other: f"{job}_0"}
    finally:
        cluster.cancel()
        cluster.workers[last].run("minivm", "resume")
    cluster.wait_node(last, "idle")


def test_a_pod_that_offers_something_else_is_taken_at_its_word(cluster: Cluster) -> None:
    """slurmctld reads a dynamic node's description when it makes the record; the record must not stay as it was."""
    stop(cluster, "w1")
    cluster.replaced("w1", env={"MINIVM_NODE_FEATURES": "blue", "MINIVM_NODE_CONF": "RealMemory=2000 Weight=7"})
    cluster.workers["w1"].wait_ready()
    cluster.wait_node("w1", "idle")
    assert cluster.node("w1", "%f|%m|%w") == "minivm,blue|2000|7"


def test_a_pod_that_offers_less_is_born_drained_where_a_person_had_drained_it(cluster: Cluster) -> None:
    job = cluster.submit("--nodelist=w1")
    cluster.wait_job(job, "RUNNING")
    reason = 'fan 3 is "loud", ask Ann'
    cluster.slurm("scontrol", "update", "nodename=w1", "state=drain", f"reason={reason}", user="slurm")
    since = cluster.node("w1", "%H")
    cluster.workers["w1"].container.kill()
    env = {"MINIVM_NODE_FEATURES": "blue", "MINIVM_NODE_CONF": "RealMemory=1000"}
    worker = cluster.replaced("w1", env=env)
    worker.wait_ready()
    cluster.wait_node("w1", "drained")
    assert cluster.node("w1", "%f|%m") == "minivm,blue|1000"
    assert cluster.node("w1", "%E") == f"fan 3 is 'loud', ask Ann [slurm@{since}]"
    assert cluster.job(job) == "PENDING"
    cluster.cancel()
    # Once resumed it stays so, however slurmd comes to start again.
    cluster.slurm("scontrol", "update", "nodename=w1", "state=resume")
    cluster.wait_node("w1", "idle")
    cluster.slurm("scontrol", "delete", "nodename=w1")
    worker.run("minivm", "restart", "slurmd")
    cluster.wait_node("w1", "idle")


def test_a_drain_that_was_lifted_while_the_pod_started_is_not_made_again(cluster: Cluster) -> None:
    """The record cannot go yet, because a reservation names it. When it can, nobody holds the node any more."""
    cluster.slurm("scontrol", "update", "nodename=w1", "state=drain", "reason=fan is loud", user="slurm")
    cluster.workers["w1"].container.kill()
    reservation = ("reservationname=fan", "starttime=now", "duration=60", "users=root", "flags=maint", "nodes=w1")
    cluster.slurm("scontrol", "create", *reservation)

    def state() -> str:
        return cluster.slurm("scontrol", "--oneliner", "show", "node", "w1").partition(" State=")[2].split()[0]

    until(lambda: "MAINT" in state(), "the reservation has begun", seen=state)
    worker = cluster.replaced("w1", env={"MINIVM_NODE_FEATURES": "green"})
    until(
        lambda: worker.code("test", "-e", "/run/minivm/env/born")[0] == 0,
        "it was to be born drained",
        seen=lambda: worker.run("minivm", "logs", "fresh-node"),
    )
    # No try that has looked before may delete after.
    worker.run("minivm", "stop", "fresh-node")
    until(lambda: worker.code("ps", "-C", "scontrol")[0] == 1, "no call of it is under way")
    cluster.slurm("scontrol", "update", "nodename=w1", "state=resume")
    cluster.slurm("scontrol", "delete", "reservationname=fan")
    worker.run("minivm", "start", "fresh-node")
    worker.wait_ready()
    cluster.wait_node("w1", "idle")
    assert cluster.node("w1", "%f|%T|%E") == "minivm,green|idle|none"


def records(cluster: Cluster) -> str:
    """Run now what the controller runs every half minute."""
    return cluster.controller.run("/opt/minivm/bin/python3", "-I", "-m", "init.slurm.records", user="slurm")


def test_why_tells_of_a_persons_drain_and_asks_only_then(cluster: Cluster) -> None:
    worker = cluster.workers["w2"]
    cluster.slurm("scontrol", "update", "nodename=w2", "state=drain", "reason=fan is loud", user="slurm")
    since = cluster.node("w2", "%H")
    told = f"no jobs come: the node is drained in Slurm by slurm since {since}: fan is loud"

    def is_well() -> bool:
        code, text = worker.code("minivm", "why")
        return code == 0 and told in text

    until(is_well, "the pod is well", seen=worker.account)
    cluster.slurm("scontrol", "update", "nodename=w2", "state=resume")
    cluster.wait_node("w2", "idle")
    assert "no jobs" not in worker.code("minivm", "why")[1]
    assert "no jobs" not in cluster.controller.code("minivm", "why")[1], "it has no node"


def test_the_author_of_a_drain_is_kept_while_the_pod_is_away_for_long(cluster: Cluster) -> None:
    """slurmctld would put its own name to it after SlurmdTimeout.

    It is 120 s here, as in the chart. Of the tests' 60 s a failing ping leaves 40 s, less what it takes itself: too
    few for a service that looks every 30 s.
    """
    conf = slurm_conf(accounting=False).replace("\nSlurmdTimeout=60\n", "\nSlurmdTimeout=120\n")
    cluster.world.configure({"slurm.conf": conf})
    limit = re.compile(r"^SlurmdTimeout += 120 sec$", re.MULTILINE)
    until(lambda: limit.search(cluster.controller.code("scontrol", "show", "config")[1]), "slurmctld has the limit")
    cluster.slurm("scontrol", "update", "nodename=w2", "state=drain", "reason=fan is loud", user="slurm")
    since = cluster.node("w2", "%H")
    cluster.workers["w2"].container.kill()
    kept = f"fan is loud [slurm@{since}]"
    until(lambda: cluster.node("w2", "%E") == kept, "it is kept", within=240, seen=lambda: cluster.held("w2"))
    assert "State=DOWN+DRAIN" in cluster.slurm("scontrol", "--oneliner", "show", "node", "w2")
    cluster.replaced("w2").wait_ready()
    cluster.wait_node("w2", "drained")
    assert cluster.node("w2", "%E") == kept
    cluster.slurm("scontrol", "update", "nodename=w2", "state=resume")
    cluster.wait_node("w2", "idle")
    cluster.configure()


def test_a_worker_that_is_no_longer_made_is_forgotten_unless_somebody_holds_it(cluster: Cluster) -> None:
    names = ("s-gpu-1", "s-gpu-2", "s-gpu-3")
    for name in names:
        cluster.workers[name] = cluster.world.pod("worker", name, env=ENV)

    def made(count: int) -> None:
        pools = f'{{"release": "s", "pools": {{"s-gpu": {count}}}}}'
        cluster.world.configure({"slurm.conf": slurm_conf(accounting=False), "pools.json": pools})

    def known() -> set[str]:
        return set(cluster.slurm("sinfo", "--noheader", "--Node", "--format", "%N").split())

    made(4)
    for name in names:
        cluster.workers[name].wait_ready()
    cluster.slurm("scontrol", "update", "nodename=s-gpu-2", "state=drain", "reason=fan is loud", user="slurm")
    for name in names:
        stop(cluster, name)
    assert records(cluster) == "" and known() == {"w1", "w2", *names}, "they come back"
    made(2)
    records(cluster)  # by itself it is due within half a minute, which the test above waits for
    until(lambda: known() == {"w1", "w2", "s-gpu-1", "s-gpu-2"}, "the name is gone for good")
    assert cluster.held("s-gpu-2").startswith("fan is loud|slurm|")
    cluster.slurm("scontrol", "delete", "nodename=s-gpu-1,s-gpu-2")
