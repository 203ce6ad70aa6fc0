"""Logins."""

from __future__ import annotations

from tests.conformance.cluster import Cluster, is_ready, not_offered

COMMANDS = ("sbatch", "srun", "salloc", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sacctmgr", "sstat")


def test_the_commands_of_slurm_are_there(cluster: Cluster) -> None:
    """A user on a login pod finds Slurm's commands in the path."""
    found = cluster.as_user("sh", "-c", 'for c in "$@"; do command -v $c; done', "sh", *COMMANDS).split()
    assert sorted(path.rpartition("/")[2] for path in found) == sorted(COMMANDS)


def test_a_user_has_one_id_everywhere(cluster: Cluster) -> None:
    """A user's name is the same user and group id on logins, workers and the controller, which writes jobs' records."""
    name = cluster.adapter.user.name
    ids = {role: cluster.run_in(role, "id", name).strip() for role in ("controller", "login", "worker")}
    assert len(set(ids.values())) == 1 and "uid=" in ids["login"], ids


def test_ssh_answers_by_the_service(cluster: Cluster) -> None:
    """The Service for people leads to an ssh server on the login pods."""
    if not (ssh := cluster.adapter.ssh):
        not_offered("the adapter names no ssh")
    words = ("ssh-keyscan", "-T", "10", "-p", str(ssh.port), ssh.service)
    done = cluster.attempt_in("login", *words)
    assert "ssh-" in done.stdout, done


def test_the_service_leads_to_ready_login_pods_only(cluster: Cluster) -> None:
    """New sessions reach login pods that are ready, and all of these."""
    if not (ssh := cluster.adapter.ssh):
        not_offered("the adapter names no ssh")
    subsets = cluster.get("endpoints", ssh.service).get("subsets") or []
    addresses = {each["ip"] for subset in subsets for each in subset.get("addresses") or ()}
    ready = {pod["status"]["podIP"] for pod in cluster.pods("login") if is_ready(pod)}
    assert addresses and addresses == ready, f"{addresses} in the Service, {ready} are ready"


def test_ssh_takes_no_password(cluster: Cluster) -> None:
    """The ssh server offers no authentication by password, which is guessed from outside."""
    if not (ssh := cluster.adapter.ssh):
        not_offered("the adapter names no ssh")
    options = (
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "PreferredAuthentications=none",
    )
    words = ("ssh", "-F", "none", *(word for each in options for word in ("-o", each)), "-p", str(ssh.port))
    done = cluster.attempt_in("login", *words, f"{cluster.adapter.user.name}@{ssh.service}", "true")
    assert "Permission denied (" in done.stderr, done
    methods = done.stderr.partition("Permission denied (")[2].partition(")")[0].split(",")
    assert methods and not {"password", "keyboard-interactive"} & set(methods), methods


def test_a_user_sees_the_queue(cluster: Cluster) -> None:
    """A user's own job is in `squeue` with its state and reason."""
    job = cluster.submit("--hold")
    assert cluster.as_user("squeue", "-h", "-j", job, "-o", "%i %T %r") == f"{job} PENDING JobHeldUser"
