"""The chart on a real Kubernetes: installed, every pod ready, jobs on two nodes, a home that they share."""

from __future__ import annotations

import json

import pytest

from tests.kubernetes.kubectl import Object, condition
from tests.kubernetes.world import Release
from tests.waiting import until

# The first of them may have to wait until Kubernetes is built.
pytestmark = pytest.mark.timeout(3600)
# The first minor release of Kubernetes with ValidatingAdmissionPolicies.
HAS_POLICIES = 30
# The directory is no part of the cluster, and has no account to say it with.
OWN_CONDITIONS: dict[str, tuple[str, ...]] = {"demo-0": ()}


def test_the_chart_is_installed_and_every_pod_gets_ready(installed: Release) -> None:
    """By the kubelets' own probes, and by the readiness gate, which a pod opens itself with its account's token."""
    took = installed.wait_ready()
    print(f"install to all ready: {took:.1f} s")

    def unready() -> list[str]:
        """A pod is not ready for a moment while slurmctld is busy."""
        return [
            f"{name}: {kind}"
            for name, pod in installed.pods().items()
            for kind in ("ContainersReady", *OWN_CONDITIONS.get(name, ("minivm.io/Ready",)))
            if not condition(pod, kind)
        ]

    until(lambda: not unready(), "every pod has both conditions", seen=unready)
    pods = installed.pods()
    assert set(pods) == {"controller-0", "demo-0", "login-0", "worker-0", "worker-1"}
    for name, pod in pods.items():
        (status,) = pod["status"]["containerStatuses"]
        assert status["started"] and status["restartCount"] == 0, name
    assert len({installed.node_of(f"worker-{number}") for number in (0, 1)}) == 2


def test_the_keys_were_made_in_the_cluster_by_a_job_that_ended(release: Release) -> None:
    (job,) = release.get("jobs")["items"]
    assert job["status"]["succeeded"] == 1
    for name in ("slurm-key", "jwt", "ssh-host-keys", "database"):
        secret = release.get("secret", f"{release.name}-{name}")
        assert secret["data"] and secret["metadata"]["annotations"]["minivm.io/key"] == "made"


def test_a_job_submitted_on_the_login_pod_runs_and_is_accounted(release: Release) -> None:
    job = release.submit("alice", "-N1", script="hostname; id -un")
    release.wait_for(job, "COMPLETED")
    said = release.as_user("alice", f"cat slurm-{job}.out").split()
    assert said[0] in {f"{release.name}-worker-0", f"{release.name}-worker-1"} and said[1] == "alice"
    accounted = ["sacct", "-n", "-X", "-j", job, "-o", "state%20"]
    until(lambda: release.slurm(*accounted) == "COMPLETED", "the job is accounted", seen=lambda: release.slurm("sacct"))


def test_a_task_on_each_of_two_nodes(release: Release) -> None:
    release.wait_idle()
    said = release.as_user("alice", "srun -N2 hostname")
    assert sorted(said.split()) == [f"{release.name}-worker-{number}" for number in (0, 1)]


def test_what_is_written_at_home_is_there_on_every_pod(release: Release) -> None:
    """Use one volume on three machines at once."""
    release.as_user("bob", "echo mine > note")
    for pod in ("worker-0", "worker-1"):
        assert release.run(pod, "cat", "/home/bob/note").strip() == "mine"
        assert release.run(pod, "stat", "-c", "%U", "/home/bob/note").strip() == "bob"


def test_people_come_in_by_the_service_with_their_key_alone(release: Release) -> None:
    """To a pod whose host key is the one that the cluster has made."""
    for user, other in (("alice", "bob"), ("bob", "alice")):
        assert release.as_user(user, "id -un; hostname").split() == [user, f"{release.name}-login-0"]
        assert release.door
        refused = release.door.try_(user, "true", key=release.key(other))
        assert refused.returncode == 255 and "Permission denied" in refused.stderr


@pytest.mark.parametrize("pod", ["worker-1", "controller-0", "login-0"])
def test_root_on_a_worker_writes_the_status_of_no_other_pod(release: Release, pod: str) -> None:
    """`phase: Failed` would end a pod, `podIP` move its Services. Before Kubernetes 1.30 the limit is the role."""
    answer = "403"
    if pod == "worker-1":
        answer = "422" if minor_release(release) >= HAS_POLICIES else "200"
    assert answered(release, pod, {}) == answer


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed"},
        {"podIP": "10.9.9.9"},
        {"message": "gone"},
        {"conditions": [{"type": "Ready", "status": "False"}]},
    ],
    ids=lambda status: next(iter(status)),
)
def test_root_on_a_worker_writes_nothing_of_its_own_status_but_its_conditions(release: Release, status: Object) -> None:
    if minor_release(release) < HAS_POLICIES:
        pytest.skip("Kubernetes before 1.30 has no admission policies")
    assert answered(release, "worker-0", status) == "422"
    own = release.pods()["worker-0"]["status"]["conditions"]
    assert answered(release, "worker-0", {"conditions": [*own, {"type": "minivm.io/Test", "status": "True"}]}) == "200"


def minor_release(release: Release) -> int:
    return int(release.kubernetes.get_raw("/version")["minor"].rstrip("+"))


def answered(release: Release, pod: str, status: Object) -> str:
    """Patch the pod's status with the account of worker-0, and return the API server's answer."""
    script = (
        "import json, sys\n"
        "from init.pod.api_server import ApiError, ApiServer\n"
        f"path = '/api/v1/namespaces/{release.namespace}/pods/{release.name}-{pod}/status'\n"
        "try:\n"
        "    ApiServer('ask').ask('PATCH', path, {'status': json.load(sys.stdin)}, 'application/merge-patch+json')\n"
        "    print(200)\n"
        "except ApiError as error:\n"
        "    print(error.status)\n"
    )
    words = ("/opt/minivm/bin/python3", "-I", "-c", script)
    return release.run("worker-0", *words, stdin=json.dumps(status)).strip()
