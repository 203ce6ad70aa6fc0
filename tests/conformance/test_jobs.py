"""Submission and jobs."""

from __future__ import annotations

from tests.conformance.cluster import Cluster, not_offered, not_tried


def test_a_batch_job_runs(cluster: Cluster) -> None:
    """A batch job that a user submits on a login pod completes."""
    cluster.wait_job(cluster.submit(), "COMPLETED")


def test_a_jobs_exit_code_is_kept(cluster: Cluster) -> None:
    """A job that fails is shown as failed with the exit code of its script."""
    job = cluster.submit(script="exit 3")
    cluster.wait_job(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "3:0"


def test_srun_brings_back_output_and_exit_code(cluster: Cluster) -> None:
    """`srun` writes what its task writes, and ends as it ends."""
    assert cluster.srun("sh", "-c", "echo out of $SLURMD_NODENAME").startswith("out of ")
    done = cluster.attempt_as(
        cluster.adapter.user, "srun", f"--job-name={cluster.job_name}", "--chdir=/tmp", "sh", "-c", "exit 4"
    )
    assert done.returncode == 4, done


def test_srun_passes_standard_input(cluster: Cluster) -> None:
    """A task reads what its user writes to `srun`."""
    assert cluster.srun("cat", stdin="a line\n") == "a line"


def test_a_task_runs_on_each_of_two_nodes(cluster: Cluster) -> None:
    """One job has tasks on two workers, started over the network."""
    if len(cluster.workers()) < 2:
        not_tried("there is one worker")
    names = cluster.srun("-N2", "--ntasks-per-node=1", "sh", "-c", "echo $SLURMD_NODENAME").split()
    assert len(set(names)) == 2 and set(names) <= set(cluster.workers()), names


def test_a_job_runs_on_the_node_that_it_asks_for(cluster: Cluster) -> None:
    """`-w NODE` leads to the pod of that name."""
    node, pod = cluster.worker()
    host = cluster.run_in("worker", "hostname", pod=pod).strip()
    assert cluster.srun("-w", node, "hostname") == host


def test_a_job_runs_as_the_user_who_submitted_it(cluster: Cluster) -> None:
    """A user's numeric id on the worker is the one on the login pod."""
    assert cluster.srun("id", "-u") == cluster.as_user("id", "-u")


def test_a_job_array_runs_whole(cluster: Cluster) -> None:
    """Every task of an array completes."""
    job = cluster.submit("--array=0-5")
    cluster.wait_job(job, "COMPLETED")
    assert len(cluster.states(job)) == 6


def test_a_dependent_job_waits_for_the_other(cluster: Cluster) -> None:
    """`afterok` starts a job once the other has completed, and not before."""
    first = cluster.submit(script="sleep 3")
    second = cluster.submit(f"--dependency=afterok:{first}")
    cluster.wait_job(second, "COMPLETED")
    assert cluster.job(second)["StartTime"] >= cluster.job(first)["EndTime"]


def test_a_held_job_waits_for_its_release(cluster: Cluster) -> None:
    """A job that was submitted with `--hold` starts when it is released."""
    job = cluster.submit("--hold")
    assert cluster.job(job)["JobState"] == "PENDING" and "Held" in cluster.job(job)["Reason"]
    cluster.as_admin("scontrol", "release", job)
    cluster.wait_job(job, "COMPLETED")


def test_a_cancelled_jobs_processes_are_gone(cluster: Cluster) -> None:
    """`scancel` by the user ends the job and every process of it on the worker."""
    node, pod = cluster.worker()
    job = cluster.submit("-w", node, script="exec sleep 98761")
    cluster.until(lambda: running(cluster, pod, "sleep 98761"), "the job's process runs")
    cluster.as_user("scancel", job)
    cluster.wait_job(job, "CANCELLED")
    cluster.until(lambda: not running(cluster, pod, "sleep 98761"), "the job's process is gone")


def test_a_process_that_left_its_job_ends_with_it(cluster: Cluster) -> None:
    """A process that a job left in a session of its own ends with the job."""
    node, pod = cluster.worker()
    script = "setsid sleep 98762 </dev/null >/dev/null 2>&1 &\nsleep 5"
    job = cluster.submit("-w", node, script=script)
    cluster.until(lambda: running(cluster, pod, "sleep 98762"), "the process runs")
    cluster.wait_job(job, "COMPLETED")
    cluster.until(lambda: not running(cluster, pod, "sleep 98762"), "the process is gone")


def running(cluster: Cluster, pod: str, command: str) -> bool:
    """Tell whether a process with exactly this command line runs in the worker's pod."""
    script = 'for file in /proc/[0-9]*/cmdline; do tr "\\0" " " <"$file" 2>/dev/null; echo; done'
    lines = cluster.run_in("worker", "sh", "-c", script, pod=pod).splitlines()
    return any(line.strip() == command for line in lines)


def test_a_job_is_confined_to_its_processors(cluster: Cluster) -> None:
    """A task that asks for one processor is bound to one, or to the threads of one core."""
    node, pod = cluster.worker()
    whole = int(cluster.nodes()[node]["CPUTot"])
    if whole < 2:
        not_tried(f"{node} has one processor")
    found = cluster.srun("-w", node, "-n1", "-c1", "nproc")
    threads = int(cluster.nodes()[node].get("ThreadsPerCore", "1"))
    assert 1 <= int(found) <= threads, f"{found} of {whole} processors on {node} ({pod})"


def test_a_job_is_confined_to_its_memory(cluster: Cluster) -> None:
    """A step that uses far more memory than its job asked for is ended, and its worker is not."""
    node, pod = cluster.worker()
    before = restarts(cluster, pod)
    # tail keeps a line that does not end: 400 MiB.
    hungry = "head -c 400M /dev/zero | tail >/dev/null; sleep 45"
    done = cluster.attempt_as(
        cluster.adapter.user,
        "srun",
        f"--job-name={cluster.job_name}",
        "--chdir=/tmp",
        "-w",
        node,
        "--mem=64M",
        "sh",
        "-c",
        hungry,
    )
    assert done.returncode != 0, "the step had 400 MiB of memory, and had asked for 64"
    assert restarts(cluster, pod) == before


def restarts(cluster: Cluster, pod: str) -> int:
    found = cluster.get("pod", pod)["status"]["containerStatuses"]
    return sum(int(each["restartCount"]) for each in found)


def test_a_jobs_time_limit_ends_it(cluster: Cluster) -> None:
    """A job that runs past its time limit is ended and shown as timed out."""
    job = cluster.submit("--time=1", script="sleep 600")
    cluster.wait_job(job, "TIMEOUT", within=240)


def test_a_requeued_job_starts_again(cluster: Cluster) -> None:
    """`scontrol requeue` puts a running job back into the queue, under its number."""
    job = cluster.submit("--requeue", script="sleep 600")
    cluster.wait_job(job, "RUNNING")
    cluster.as_admin("scontrol", "requeue", job)
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "the job was requeued", seen=lambda: cluster.job(job))


def test_an_allocation_can_be_used_interactively(cluster: Cluster) -> None:
    """`salloc` gives an allocation, and `srun` in it runs there."""
    words = (
        "salloc",
        f"--job-name={cluster.job_name}",
        "--chdir=/tmp",
        "-N1",
        "srun",
        "sh",
        "-c",
        "echo job $SLURM_JOB_ID",
    )
    assert "job " in cluster.as_user(*words)


def test_a_job_knows_where_it_runs(cluster: Cluster) -> None:
    """A job's environment has its number, its nodes and its submission host, as Slurm documents them."""
    script = "echo $SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_SUBMIT_HOST"
    number, nodes, host = cluster.srun("sh", "-c", script).split()
    assert number.isdigit() and nodes in cluster.workers() and host, (number, nodes, host)


def test_srun_offers_pmix_or_pmi2(cluster: Cluster) -> None:
    """The ranks of an MPI program find each other by a plugin of `srun`."""
    done = cluster.attempt_as(cluster.adapter.user, "srun", "--mpi=list")
    found = f"{done.stdout}{done.stderr}".split()
    assert {"pmix", "pmi2"} & set(found), found


def test_shared_memory_is_more_than_the_runtimes_default(cluster: Cluster) -> None:
    """/dev/shm on a worker is larger than 64 MiB, in which data loaders of training fail."""
    lines = cluster.srun("df", "-B1", "--output=size", "/dev/shm").split()
    assert int(lines[-1]) > 64 << 20, lines


def test_a_directory_is_shared_by_logins_and_workers(cluster: Cluster) -> None:
    """The login pod shows its user what a job wrote into the shared directory."""
    if not (shared := cluster.adapter.shared_directory):
        not_offered("the adapter names no shared_directory")
    path = f"{shared}/.conformance-{cluster.as_user('sh', '-c', 'echo $$')}"
    try:
        cluster.srun("sh", "-c", 'echo written >"$0"', path)
        assert cluster.as_user("cat", path) == "written"
    finally:
        cluster.as_user("rm", "-f", path)


def test_a_burst_of_jobs_is_run(cluster: Cluster) -> None:
    """Twenty jobs that are submitted at once all complete, and no node is drained by it."""
    job = cluster.submit("--array=1-20")
    cluster.wait_job(job, "COMPLETED", within=300)
    drained = [name for name, node in cluster.nodes().items() if "DRAIN" in node["State"] and name in cluster.workers()]
    assert not drained and len(cluster.states(job)) == 20, drained


def test_a_workers_temporary_directory_is_writable(cluster: Cluster) -> None:
    """A job may write to /tmp on its worker."""
    node, pod = cluster.worker()
    assert cluster.srun("-w", node, "sh", "-c", "f=$(mktemp) && echo ok >$f && cat $f && rm $f") == "ok", pod


def test_the_nodes_record_shows_what_its_jobs_use(cluster: Cluster) -> None:
    """While a job runs its node is shown with that job's processors allocated, and free afterwards."""
    node, _ = cluster.worker()
    job = cluster.submit("-w", node, script="sleep 600")
    cluster.wait_job(job, "RUNNING")
    assert int(cluster.nodes()[node]["CPUAlloc"]) >= 1
    cluster.as_user("scancel", job)
    cluster.until(lambda: cluster.nodes()[node]["CPUAlloc"] == "0", f"{node} is free again")
