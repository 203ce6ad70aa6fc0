"""Roll and scale."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tests.conformance.cluster import Cluster, is_ready, not_offered, not_tried, takes_jobs, uid_of

RESTARTED = "kubectl.kubernetes.io/restartedAt"


@contextlib.contextmanager
def scaled(cluster: Cluster, by: int) -> Iterator[None]:
    if not (of := cluster.adapter.scale):
        not_offered("the adapter names no scale")
    before = of.value_in(cluster.get(*of.object.split("/", 1)))
    assert isinstance(before, int), f"{of} is {before!r}: expected the number of workers"
    if before + by < 1:
        not_tried("there is one worker")
    with cluster.changed(of, before + by):
        yield


def test_a_worker_more_takes_jobs_and_none_once_it_is_removed(cluster: Cluster) -> None:
    """A worker that Kubernetes' means alone add becomes a node that runs a job; its node takes none once it is gone."""
    before = set(cluster.workers())
    with scaled(cluster, 1):
        added = one_more(cluster, before)
        job = cluster.submit("-w", added)
        cluster.wait_job(job, "COMPLETED")
    cluster.until(lambda: set(cluster.workers()) == before, "it is gone", within=300, seen=cluster.overview)
    cluster.until(
        lambda: not takes_jobs(cluster.nodes().get(added, {})), f"{added} takes no jobs", seen=cluster.overview
    )


def one_more(cluster: Cluster, before: set[str]) -> str:
    """Wait for another worker whose node takes jobs, and return the node's name."""

    def found() -> list[str]:
        nodes = cluster.nodes()
        return [name for name in set(cluster.workers()) - before if takes_jobs(nodes.get(name, {}))]

    return cluster.until(found, "another worker takes jobs", within=300, seen=cluster.overview)[0]


def test_a_job_on_a_removed_worker_comes_back(cluster: Cluster) -> None:
    """A job that runs on a worker which is scaled away runs to its end there, or is put back into the queue."""
    before = set(cluster.workers())
    with scaled(cluster, 1):
        added = one_more(cluster, before)
        job = cluster.submit("-w", added, "--requeue", script="sleep 600")
        cluster.wait_job(job, "RUNNING")
    cluster.until(lambda: set(cluster.workers()) == before, "it is gone", within=300, seen=cluster.overview)
    cluster.wait_job(job, "PENDING", "COMPLETED")


def restart(cluster: Cluster, role: str) -> None:
    """Change the template of the role's pods as `kubectl rollout restart` does."""
    if not (of := cluster.adapter.roll.get(role)):
        not_offered(f"the adapter names no roll of {role}")
    cluster.patch(of, {RESTARTED: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})


def replaced(cluster: Cluster, role: str, before: set[str]) -> bool:
    pods = cluster.pods(role, leaving=True)
    fresh = [pod for pod in pods if is_ready(pod) and uid_of(pod) not in before]
    return len(fresh) == len(pods) == len(before)


def test_a_roll_of_the_workers_keeps_one_at_work_and_loses_no_job(cluster: Cluster) -> None:
    """Workers are replaced one after the other under an array of short jobs, all of which complete."""
    if len(cluster.workers()) < 2:
        not_tried("there is one worker")
    names, before = set(cluster.workers()), {uid_of(pod) for pod in cluster.pods("worker")}
    array = cluster.submit("--array=1-12", "--requeue", script="sleep 4")

    def rolled() -> bool:
        assert any(is_ready(pod) for pod in cluster.pods("worker")), "no worker was ready"
        return replaced(cluster, "worker", before)

    restart(cluster, "worker")
    cluster.until(rolled, "every worker is another pod", within=600, seen=cluster.overview)
    assert set(cluster.workers()) == names, "the nodes have other names"
    cluster.wait_job(array, "COMPLETED", within=420)


def test_a_roll_of_the_logins_gives_a_login_that_works(cluster: Cluster) -> None:
    """A login pod that was replaced submits jobs."""
    before = {uid_of(pod) for pod in cluster.pods("login")}
    restart(cluster, "login")
    cluster.until(lambda: replaced(cluster, "login", before), "the login is another", within=300, seen=cluster.overview)
    cluster.wait_job(cluster.submit(), "COMPLETED")
