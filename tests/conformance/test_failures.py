"""Failure of pods and daemons."""

from __future__ import annotations

from tests.conformance.cluster import Cluster, is_ready, name_of, not_offered, takes_jobs, uid_of

# Prints the numbers of the processes whose program has this name.
PROCESSES = 'for d in /proc/[0-9]*; do [ "$(cat $d/comm 2>/dev/null)" = "$0" ] && echo "${d#/proc/}"; done; true'


def processes(cluster: Cluster, daemon: str, pod: str) -> list[str]:
    role = role_of(cluster, daemon)
    return cluster.run_in(role, "sh", "-c", PROCESSES, daemon, pod=pod).split()


def role_of(cluster: Cluster, daemon: str) -> str:
    if not (role := cluster.adapter.daemons.get(daemon)):
        not_offered(f"the adapter does not say whose {daemon} is")
    return role


def signal(cluster: Cluster, daemon: str, pod: str, name: str) -> list[str]:
    """Send a signal to the daemon's processes of this moment, by number."""
    numbers = processes(cluster, daemon, pod)
    assert numbers, f"no process {daemon} in {pod}"
    cluster.run_in(role_of(cluster, daemon), "sh", "-c", 'kill -s "$0" "$@"', name, *numbers, pod=pod)
    return numbers


def another(cluster: Cluster, role: str, old: str) -> bool:
    """Tell whether all pods of the role are ready and none is the old one."""
    pods = cluster.pods(role, leaving=True)
    return bool(pods) and all(is_ready(pod) and uid_of(pod) != old for pod in pods)


def delete(cluster: Cluster, role: str, pod: str, *, force: bool = False) -> str:
    old = uid_of(cluster.get("pod", pod))
    cluster.kubectl("delete", "pod", pod, "--wait=false", *(("--grace-period=0", "--force") if force else ()))
    return old


def recorded(cluster: Cluster, job: str) -> str:
    return cluster.as_admin("sacct", "-n", "-P", "-X", "-j", job, "-o", "State")


def test_a_deleted_worker_gives_its_job_back_and_is_a_node_again(cluster: Cluster) -> None:
    """A job on a deleted worker waits in the queue again, and the pod that follows has the node and runs jobs."""
    node, pod = cluster.worker()
    job = cluster.submit("-w", node, "--requeue", script="sleep 600")
    cluster.wait_job(job, "RUNNING")
    old = delete(cluster, "worker", pod)
    cluster.until(lambda: another(cluster, "worker", old), "another pod is ready", within=300, seen=cluster.overview)
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "the job was requeued", seen=lambda: cluster.job(job))
    cluster.until(lambda: takes_jobs(cluster.nodes().get(node, {})), f"{node} takes jobs", seen=cluster.overview)
    cluster.wait_job(cluster.submit("-w", node), "COMPLETED")


def test_a_worker_that_dies_at_once_is_a_node_again(cluster: Cluster) -> None:
    """A worker that goes without a grace period, as with its machine, comes back, and its job is not forgotten."""
    node, pod = cluster.worker()
    job = cluster.submit("-w", node, "--requeue", script="sleep 600")
    cluster.wait_job(job, "RUNNING")
    old = delete(cluster, "worker", pod, force=True)
    cluster.until(lambda: another(cluster, "worker", old), "another pod is ready", within=300, seen=cluster.overview)
    cluster.until(lambda: takes_jobs(cluster.nodes().get(node, {})), f"{node} takes jobs", seen=cluster.overview)

    def judged() -> bool:
        found = cluster.job(job)
        return found["Restarts"] == "1" or found["JobState"] in ("NODE_FAIL", "FAILED")

    cluster.until(judged, "slurmctld noticed that the job's processes are gone", seen=lambda: cluster.job(job))


def test_a_killed_slurmd_comes_back_and_its_job_runs_on(cluster: Cluster) -> None:
    """slurmd is killed: it is started again without the pod, and the job's processes are not touched."""
    node, pod = cluster.worker()
    job = cluster.submit("-w", node, script="sleep 25; exit 6")
    cluster.wait_job(job, "RUNNING")
    old = uid_of(cluster.get("pod", pod))
    killed = signal(cluster, "slurmd", pod, "KILL")
    cluster.until(lambda: set(processes(cluster, "slurmd", pod)) - set(killed), "slurmd is there again")
    cluster.wait_job(job, "FAILED")
    found = cluster.job(job)
    assert (found["ExitCode"], found["Restarts"], uid_of(cluster.get("pod", pod))) == ("6:0", "0", old), found


def test_a_stopped_slurmd_is_noticed(cluster: Cluster) -> None:
    """A worker whose slurmd hangs is not ready, or slurmd is started again."""
    _, pod = cluster.worker()
    stopped = signal(cluster, "slurmd", pod, "STOP")

    def noticed() -> bool:
        found = next((each for each in cluster.pods("worker") if name_of(each) == pod), None)
        return found is None or not is_ready(found) or not set(stopped) & set(processes(cluster, "slurmd", pod))

    try:
        cluster.until(noticed, f"{pod} is not ready", within=240, seen=cluster.overview)
    finally:
        # A process that is gone, or that runs, takes no harm from it.
        cluster.attempt_in("worker", "sh", "-c", 'kill -s CONT "$@"', "sh", *stopped, pod=pod)


def test_a_deleted_controller_costs_no_job(cluster: Cluster) -> None:
    """The controller's pod is deleted: the running job completes, the waiting one starts, both are recorded."""
    runs = cluster.submit(script="sleep 30")
    waits = cluster.submit(f"--dependency=afterok:{runs}")
    cluster.wait_job(runs, "RUNNING")
    pod = cluster.pod("controller")
    old = delete(cluster, "controller", pod)
    cluster.until(lambda: another(cluster, "controller", old), "another controller", within=300, seen=cluster.overview)
    cluster.wait_quiet()
    for job in (runs, waits):
        cluster.wait_job(job, "COMPLETED")
        assert cluster.job(job)["Restarts"] == "0"
        cluster.until(lambda job=job: recorded(cluster, job) == "COMPLETED", f"{job} is recorded")  # type: ignore[misc]


def test_a_killed_slurmctld_keeps_the_queue(cluster: Cluster) -> None:
    """slurmctld is killed: it is started again with the jobs that it had saved."""
    runs = cluster.submit(script="sleep 900")
    held = cluster.submit("--hold")
    cluster.wait_job(runs, "RUNNING")
    wait_saved(cluster, held)
    pod = cluster.pod("controller")
    killed = signal(cluster, "slurmctld", pod, "KILL")

    def back() -> bool:
        return bool(set(processes(cluster, "slurmctld", pod)) - set(killed))

    cluster.until(back, "slurmctld is there again", seen=cluster.overview)
    cluster.wait_quiet()
    assert [cluster.job(job)["JobState"] for job in (runs, held)] == ["RUNNING", "PENDING"]


def wait_saved(cluster: Cluster, job: str) -> None:
    """Wait until slurmctld has written its jobs; it forgets what it has not written when it is killed."""
    path = f"{cluster.config()['StateSaveLocation']}/job_state"
    pod = cluster.pod("controller")

    def written() -> str:
        return cluster.run_in("controller", "stat", "-L", "-c", "%.9Y %i", path, pod=pod)

    before = written()
    # Saved jobs are not written again until one of them changes.
    cluster.as_admin("scontrol", "update", f"jobid={job}", "comment=saved")
    cluster.until(lambda: written() != before, f"{path} is written", within=120)


def test_jobs_run_without_slurmdbd_and_are_recorded_later(cluster: Cluster) -> None:
    """slurmdbd is killed: jobs go on, and their records arrive."""
    role = role_of(cluster, "slurmdbd")
    pod = cluster.pod(role)
    signal(cluster, "slurmdbd", pod, "KILL")
    job = cluster.submit()
    cluster.wait_job(job, "COMPLETED")
    cluster.until(lambda: recorded_or_nothing(cluster, job) == "COMPLETED", "the job is recorded", within=300)


def recorded_or_nothing(cluster: Cluster, job: str) -> str:
    """Return the job's state in the accounting; nothing while slurmdbd is away."""
    who = cluster.adapter.administrator
    done = cluster.attempt_as(who, "sacct", "-n", "-P", "-X", "-j", job, "-o", "State")
    return str(done.stdout).strip() if done.returncode == 0 else ""


def test_a_deleted_login_comes_back_with_the_same_host_key(cluster: Cluster) -> None:
    """A login pod that follows a deleted one has its host key, so that no client takes it for a stranger."""
    if not (ssh := cluster.adapter.ssh):
        not_offered("the adapter names no ssh")

    def host_keys() -> set[str]:
        done = cluster.attempt_in("login", "ssh-keyscan", "-T", "10", "-p", str(ssh.port), ssh.service)
        return {line.partition(" ")[2] for line in done.stdout.splitlines() if " ssh-" in line}

    before = cluster.until(host_keys, "the host keys are read")
    pod = cluster.pod("login")
    old = delete(cluster, "login", pod)
    cluster.until(lambda: another(cluster, "login", old), "another login is ready", within=300, seen=cluster.overview)
    assert cluster.until(host_keys, "the host keys are read") == before


def test_a_deleted_login_costs_no_batch_job(cluster: Cluster) -> None:
    """A batch job that was submitted on a login pod outlives it."""
    job = cluster.submit(script="sleep 900")
    cluster.wait_job(job, "RUNNING")
    old = delete(cluster, "login", cluster.pod("login"))
    cluster.until(lambda: another(cluster, "login", old), "another login is ready", within=300, seen=cluster.overview)
    assert cluster.job(job)["JobState"] == "RUNNING" and cluster.job(job)["Restarts"] == "0"
