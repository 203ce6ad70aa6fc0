"""Upgrade: what holds between two versions, and what the replacement of the controller's pod costs."""

from __future__ import annotations

import re
import time

from tests.conformance.cluster import Cluster, is_ready, not_offered, uid_of


def version(text: str) -> tuple[int, ...]:
    found = re.search(r"([0-9]+)\.([0-9]+)\.([0-9]+)", text)
    assert found, f"no version of Slurm in {text!r}"
    return tuple(int(part) for part in found.groups())


def test_no_daemon_is_newer_than_its_controller(cluster: Cluster) -> None:
    """No slurmd and no login has a newer Slurm than slurmctld, which would refuse it."""
    controller = version(cluster.as_admin("scontrol", "--version"))
    nodes = {name: version(cluster.nodes()[name]["Version"]) for name in cluster.workers()}
    login = version(cluster.as_user("srun", "--version"))
    assert max(nodes.values()) <= controller and login <= controller, (controller, nodes, login)


def test_slurmctld_is_of_the_release_of_the_controllers_image(cluster: Cluster) -> None:
    """slurmctld runs the version that the commands beside it have: no upgrade was left halfway."""
    running = version(cluster.config()["SLURM_VERSION"])
    assert running == version(cluster.run_in(cluster.adapter.administrator.role, "scontrol", "--version"))


def test_a_new_template_of_the_controller_costs_no_job(cluster: Cluster) -> None:
    """The controller's pod is replaced as by an upgrade: jobs run on, waiting jobs stay, numbers go on."""
    if not (of := cluster.adapter.roll.get("controller")):
        not_offered("the adapter names no roll of controller")
    runs = cluster.submit(script="sleep 900")
    cluster.wait_job(runs, "RUNNING")
    held = cluster.submit("--hold")
    before = {uid_of(pod) for pod in cluster.pods("controller")}

    def replaced() -> bool:
        pods = cluster.pods("controller", leaving=True)
        return bool(pods) and all(is_ready(pod) and uid_of(pod) not in before for pod in pods)

    cluster.patch(of, {"kubectl.kubernetes.io/restartedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    cluster.until(replaced, "the controller is another pod", within=420, seen=cluster.overview)
    cluster.wait_quiet()
    found = [cluster.job(job) for job in (runs, held)]
    assert [job["JobState"] for job in found] == ["RUNNING", "PENDING"] and found[0]["Restarts"] == "0", found
    assert int(cluster.submit()) > int(held)
