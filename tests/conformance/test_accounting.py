"""Accounting."""

from __future__ import annotations

from tests.conformance.cluster import Cluster

ACCOUNT = "conformance-suite"


def recorded(cluster: Cluster, job: str, *columns: str, steps: bool = False) -> list[list[str]]:
    """Return rows of `sacct` about the job."""
    options = ("-n", "-P", "-j", job, "-o", ",".join(columns), *(() if steps else ("-X",)))
    return [line.split("|") for line in cluster.as_admin("sacct", *options).splitlines()]


def test_a_job_is_recorded_with_its_user_and_end(cluster: Cluster) -> None:
    """`sacct` shows a finished job with its user, state and exit code."""
    job = cluster.submit(script="exit 5")
    cluster.wait_job(job, "FAILED")
    wanted = [[cluster.adapter.user.name, "FAILED", "5:0"]]
    cluster.until(
        lambda: recorded(cluster, job, "User", "State", "ExitCode") == wanted,
        "the job is recorded",
        seen=lambda: recorded(cluster, job, "User", "State", "ExitCode"),
    )


def test_each_step_of_a_job_is_recorded(cluster: Cluster) -> None:
    """`sacct` shows the batch script and each `srun` of a job as steps."""
    job = cluster.submit(script="srun true; srun true")
    cluster.wait_job(job, "COMPLETED")

    def steps() -> set[str]:
        return {row[0] for row in recorded(cluster, job, "JobID", steps=True)}

    wanted = {f"{job}.batch", f"{job}.0", f"{job}.1"}
    cluster.until(lambda: wanted <= steps(), "the steps are recorded", seen=steps)


def test_a_cancelled_job_is_recorded_with_the_user_who_did_it(cluster: Cluster) -> None:
    """`sacct` shows a cancelled job as cancelled, and by which user id."""
    job = cluster.submit("--hold")
    cluster.as_user("scancel", job)
    state = f"CANCELLED by {cluster.as_user('id', '-u')}"
    cluster.until(
        lambda: recorded(cluster, job, "State") == [[state]], state, seen=lambda: recorded(cluster, job, "State")
    )


def test_a_jobs_memory_is_recorded(cluster: Cluster) -> None:
    """`sacct` shows how much memory a step used at most."""
    job = cluster.submit(script="srun sh -c 'head -c 50M /dev/zero | tail | sleep 45'")
    cluster.wait_job(job, "COMPLETED")

    def found() -> bool:
        return any(row[0] not in ("", "0") for row in recorded(cluster, job, "MaxRSS", steps=True))

    cluster.until(found, "a step has MaxRSS", seen=lambda: recorded(cluster, job, "JobID", "MaxRSS", steps=True))


def test_the_cluster_is_registered(cluster: Cluster) -> None:
    """slurmdbd knows the cluster by its name, and where its controller is."""
    rows = cluster.as_admin("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster,ControlHost").splitlines()
    hosts = {name: host for name, _, host in (row.partition("|") for row in rows)}
    assert hosts.get(cluster.config()["ClusterName"]), hosts


def test_an_administrator_makes_and_removes_an_account(cluster: Cluster) -> None:
    """`sacctmgr` adds an account, shows it, and deletes it."""

    def accounts() -> list[str]:
        return cluster.as_admin("sacctmgr", "-n", "-P", "show", "account", "format=Account").splitlines()

    assert ACCOUNT not in accounts(), f"{ACCOUNT} is left from an earlier run: sacctmgr delete account {ACCOUNT}"
    try:
        cluster.as_admin("sacctmgr", "-i", "add", "account", ACCOUNT)
        assert ACCOUNT in accounts()
    finally:
        cluster.as_admin("sacctmgr", "-i", "delete", "account", ACCOUNT)
    assert ACCOUNT not in accounts()
