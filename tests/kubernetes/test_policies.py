"""The chart's NetworkPolicies, enforced."""

from __future__ import annotations

import pytest

from tests.kubernetes.strangers import knock, stranger, wait_running
from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)
# Pod -> ports on which one of its daemons listens: Slurm's, init's pages, the directory's.
LISTENS = {"controller-0": (6817, 6819, 8650), "login-0": (8650,), "worker-0": (6818, 22, 8650), "demo-0": (389,)}


@pytest.fixture
def enforced(release: Release) -> Release:
    if not release.kubernetes.lab:
        pytest.skip("whether this Kubernetes enforces policies is not known")
    return release


def test_a_strangers_pod_reaches_ssh_of_the_login_pods_and_nothing_else(enforced: Release) -> None:
    release = enforced
    at = {name: pod["status"]["podIP"] for name, pod in release.pods().items()}
    with stranger(release) as who:
        wait_running(release, who)
        assert knock(release, who, at["login-0"], 22) == "open"
        wanted = {(pod, port): "closed" for pod, ports in LISTENS.items() for port in ports}
        assert {(pod, port): knock(release, who, at[pod], port) for pod, port in wanted} == wanted
        # It was the policies, and none of our own pods needs them gone.
        release.upgrade(networkPolicy={"enabled": False})
        try:
            # Each machine lifts a policy in its own time, and each policy by itself: all of them are waited for.
            until(lambda: {knock(release, who, at[pod], port) for pod, port in wanted} == {"open"}, "every way is open")
        finally:
            release.upgrade(networkPolicy={"enabled": True})
        until(lambda: knock(release, who, at["controller-0"], 6817) == "closed", "the way is closed again")


def test_pods_of_one_cluster_reach_each_other_through_the_policies(enforced: Release) -> None:
    """srun's own ports are any: its steps talk back to wherever it was started."""
    enforced.wait_idle()
    said = enforced.as_user("alice", "srun -N2 --label id -un").split()
    assert sorted(said) == ["0:", "1:", "alice", "alice"]
