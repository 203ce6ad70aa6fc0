"""Change of configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.conformance.cluster import Cluster, name_of, not_offered, uid_of

# Harmless, shown by `scontrol show config`, and in nobody's file.
KEY, VALUE = "ResvOverRun", "7"


@contextlib.contextmanager
def added(cluster: Cluster, line: str) -> Iterator[None]:
    """Add a line to slurm.conf by the product's own object, and put back what was there."""
    if not (of := cluster.adapter.configuration):
        not_offered("the adapter names no configuration")
    before = of.value_in(cluster.get(*of.object.split("/", 1))) or ""
    with cluster.changed(of, f"{str(before).rstrip()}\n{line}\n".lstrip()):
        yield


def shown(cluster: Cluster) -> str:
    """Return the value that slurmctld has; nothing while it does not answer."""
    done = cluster.attempt_as(cluster.adapter.administrator, "scontrol", "show", "config")
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    return next((value.split()[0] for key, _, value in lines if key.strip() == KEY and value.strip()), "")


def lives(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Return which pod each worker is, and how often its containers were started again."""
    return {
        name_of(pod): (uid_of(pod), sum(int(each["restartCount"]) for each in pod["status"]["containerStatuses"]))
        for pod in cluster.pods("worker")
    }


def test_a_changed_setting_is_live_and_costs_no_job_and_no_worker(cluster: Cluster) -> None:
    """A line that is added to slurm.conf is live while a job runs on and no worker is replaced, and goes again."""
    before, workers = shown(cluster), lives(cluster)
    assert before and before != VALUE, f"{KEY} is {before!r}"
    job = cluster.submit(script="sleep 900")
    cluster.wait_job(job, "RUNNING")
    with added(cluster, f"{KEY}={VALUE}"):
        cluster.until(lambda: shown(cluster) == VALUE, f"{KEY} is {VALUE}", within=300, seen=lambda: shown(cluster))
        cluster.wait_job(cluster.submit(), "COMPLETED")
    cluster.until(lambda: shown(cluster) == before, f"{KEY} is {before} again", within=300, seen=lambda: shown(cluster))
    assert cluster.job(job)["JobState"] == "RUNNING" and cluster.job(job)["Restarts"] == "0"
    assert lives(cluster) == workers


def test_a_line_that_slurm_cannot_read_stops_nothing(cluster: Cluster) -> None:
    """A wrong line in slurm.conf leaves slurmctld working, jobs running and new jobs starting; its removal changes
    nothing."""
    before = shown(cluster)
    job = cluster.submit(script="sleep 900")
    cluster.wait_job(job, "RUNNING")
    # Nothing shows when the line has arrived where it is refused: eight jobs take as long as a kubelet does.
    with added(cluster, "SelectTipe=linear"):
        for _ in range(8):
            cluster.wait_job(cluster.submit(script="sleep 10"), "COMPLETED")
        assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.wait_quiet()
    assert shown(cluster) == before and cluster.job(job)["JobState"] == "RUNNING"
