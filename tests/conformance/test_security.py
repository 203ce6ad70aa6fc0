"""Security."""

from __future__ import annotations

from tests.conformance.cluster import Cluster, name_of, not_offered

NAMES = "-name '*.key' -o -name slurmdbd.conf -o -name '*.jwks'"
KEYS = f"find /etc /run /var /mnt /opt \\( {NAMES} \\) -readable 2>/dev/null"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
# Bits of the kernel's capabilities: SYS_MODULE, SYS_ADMIN.
DANGEROUS = (16, 21)


def test_no_pod_is_privileged(cluster: Cluster) -> None:
    """No container with Slurm is privileged: root in a job would be root on the machine."""
    found = [name_of(pod) for _, pod, each in cluster.containers() if each.get("securityContext", {}).get("privileged")]
    assert not found, found


def test_no_pod_has_the_machines_namespaces(cluster: Cluster) -> None:
    """No pod of Slurm sees the machine's processes or shared memory."""
    pods = [pod for _, pod in cluster.all_pods()]
    found = [name_of(pod) for pod in pods if pod["spec"].get("hostPID") or pod["spec"].get("hostIPC")]
    assert pods and not found, found


def test_no_container_may_administrate_the_kernel(cluster: Cluster) -> None:
    """The processes of jobs and logins cannot get CAP_SYS_ADMIN or CAP_SYS_MODULE."""
    for role in ("login", "worker"):
        line = cluster.run_in(role, "grep", "CapBnd", "/proc/1/status")
        mask = int(line.split()[1], 16)
        assert not [bit for bit in DANGEROUS if mask >> bit & 1], f"{role}: {line}"


def test_each_container_has_a_seccomp_profile(cluster: Cluster) -> None:
    """The system calls of each container with Slurm are filtered."""
    for role, pod, container in cluster.containers():
        of_pod = pod["spec"].get("securityContext", {}).get("seccompProfile", {})
        profile = container.get("securityContext", {}).get("seccompProfile", of_pod)
        assert profile.get("type") in ("RuntimeDefault", "Localhost"), f"{role} {name_of(pod)}: {profile}"


def test_a_job_has_no_token_of_kubernetes(cluster: Cluster) -> None:
    """A job cannot read a token with which it would be known to the API server."""
    assert cluster.srun("sh", "-c", f"cat {TOKEN} 2>/dev/null || echo none") == "none"


def test_accounts_of_logins_and_workers_read_no_secret(cluster: Cluster) -> None:
    """The service account of a login pod or a worker may not read the Secrets beside it, where the keys are."""
    for role in ("login", "worker"):
        for pod in cluster.pods(role):
            account = (
                f"system:serviceaccount:{cluster.adapter.namespace}:{pod['spec'].get('serviceAccountName', 'default')}"
            )
            done = cluster.attempt("auth", "can-i", "get", "secrets", f"--as={account}")
            assert done.stdout.strip() == "no", f"{account}: {done}"


def test_a_user_reads_no_key_of_slurm(cluster: Cluster) -> None:
    """A user on a login pod or in a job cannot read the keys by which daemons trust each other."""
    who = cluster.adapter.user
    if cluster.as_user("id", "-u") == "0":
        not_offered("the adapter's user is root, whom files do not stop")
    script = f"{KEYS}; echo end"
    for found in (cluster.attempt_as(who, "sh", "-c", script).stdout, cluster.srun("sh", "-c", script)):
        assert found.split() == ["end"], found


def test_a_user_cannot_drain_a_node(cluster: Cluster) -> None:
    """Only operators change nodes: a user's `scontrol update` is refused."""
    if cluster.as_user("id", "-u") == "0":
        not_offered("the adapter's user is root, who is Slurm's operator")
    node, _ = cluster.worker()
    words = ("scontrol", "update", f"nodename={node}", "state=drain", "reason=conformance")
    done = cluster.attempt_as(cluster.adapter.user, *words)
    try:
        assert done.returncode != 0, done
        assert "DRAIN" not in cluster.nodes()[node]["State"]
    finally:
        if done.returncode == 0:
            cluster.as_admin("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_user_cannot_cancel_another_users_job(cluster: Cluster) -> None:
    """`scancel` of somebody else's job is refused, and the job stays."""
    if not (other := cluster.adapter.other_user):
        not_offered("the adapter names no other_user")
    job = cluster.submit("--hold")
    done = cluster.attempt_as(other, "scancel", job)
    assert "denied" in f"{done.stdout}{done.stderr}".lower(), done
    assert cluster.job(job)["JobState"] == "PENDING"


def test_a_user_cannot_submit_as_another_user(cluster: Cluster) -> None:
    """`sbatch --uid` of a user is refused."""
    if cluster.as_user("id", "-u") == "0":
        not_offered("the adapter's user is root, who may")
    done = cluster.attempt_as(
        cluster.adapter.user,
        "sbatch",
        "--uid=1",
        "--hold",
        "--chdir=/tmp",
        f"--job-name={cluster.job_name}",
        "--wrap=true",
    )
    assert done.returncode != 0, done


def test_a_network_policy_covers_each_pod(cluster: Cluster) -> None:
    """A NetworkPolicy selects each pod, so that not all of the network may talk to Slurm's daemons."""
    selectors = [
        policy["spec"].get("podSelector", {}).get("matchLabels", {})
        for policy in cluster.items("networkpolicies")
        if "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
    ]
    for _, pod in cluster.all_pods():
        labels = pod["metadata"].get("labels", {})
        assert any(wanted.items() <= labels.items() for wanted in selectors), f"{name_of(pod)}: {labels}"
