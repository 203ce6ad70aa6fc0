"""What people want of a machine, between a real API server and a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.apiserver import install
from tests.kubernetes.test_fleet import Both, both_sides
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

MACHINES = "/apis/minivm.io/v1alpha1/namespaces/default/machines"
TREATS = {"machines": {"mode": "act", "remedies": {"reboot": {"annotate": {"reboot.example/please": "now"}}}}}


class Kept(Both):
    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_MACHINES="yes", **more)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with both_sides(tmp_path_factory.mktemp("goals"), "goals", Kept) as found:
        install(found.api)
        for name in found.workers:
            boots(found, name, "first")
        yield found


def boots(both: Both, name: str, boot: str) -> None:
    both.api.merge(f"/api/v1/nodes/n-{name}/status", {"status": {"nodeInfo": {"bootID": boot}}})


def machine(both: Both, name: str) -> dict[str, Any]:
    """That of the worker; empty until there is one."""
    found = both.api.ask("GET", MACHINES)["items"]
    return next((one for one in found if one.get("status", {}).get("worker") == name), {})


def status(both: Both, name: str) -> dict[str, Any]:
    said: dict[str, Any] = machine(both, name).get("status", {})
    return said


def wants(both: Both, name: str, goal: str, reason: str) -> None:
    key = until(lambda: machine(both, name), "the worker's machine is kept", seen=both.log)["metadata"]["name"]
    both.api.merge(f"{MACHINES}/{key}", {"spec": {"goal": goal, "reason": reason}})


def node(both: Both, name: str) -> tuple[bool, dict[str, str]]:
    """Whether it is cordoned by the fleet, and its annotations."""
    found = both.api.ask("GET", f"/api/v1/nodes/n-{name}")
    labels, annotations = (found["metadata"].get(key) or {} for key in ("labels", "annotations"))
    ours = "minivm.node-restriction.kubernetes.io/cordoned" in labels
    return ours and bool(found["spec"].get("unschedulable")), annotations


def is_back(both: Both, name: str) -> bool:
    return not both.reason(name) and node(both, name) == (False, {}) and status(both, name)["goal"] == "up"


def test_a_reboot_waits_for_the_job_is_asked_for_and_seen(both: Both) -> None:
    both.policy.write_text(json.dumps(TREATS))
    words = ("sbatch", "--parsable", "-w", "w1", "--chdir=/tmp", "--wrap", "sleep 7777")
    job = both.controller.run(*words, user="demo").strip()
    until(lambda: both.controller.run("squeue", "-h", "-o", "%t").split() == ["R"], "the job runs")
    with both.running():
        wants(both, "w1", "reboot", "new kernel")
        until(lambda: both.reason("w1") == "minivm: fleet: goal: reboot new kernel", "drained", seen=both.log)
        until(lambda: node(both, "w1")[0], "and cordoned by the fleet's mark", seen=both.log)
        until(lambda: "waits until it is drained" in status(both, "w1").get("why", ""), "it waits", seen=both.log)
        assert "reboot.example/please" not in node(both, "w1")[1]
        both.controller.run("scancel", job)
        until(lambda: "reboot.example/please" in node(both, "w1")[1], "nothing runs: it is asked for", seen=both.log)
        until(lambda: status(both, "w1")["remedy"]["done"], "and noted", seen=both.log)
        assert both.reason("w1"), "it gets no jobs until it is well"
        name = machine(both, "w1")["metadata"]["name"]
        said = both.ask("why", name)
        assert f"{name}: reboot: new kernel; waits for its next boot" in said
        told = json.loads(both.ask("status", "--output", "json"))
        assert told["budgets"]["remedies"] == {"now": 1, "most": 1, "mode": "act"}
        boots(both, "w1", "second")
        until(lambda: is_back(both, "w1"), "all is lifted", seen=both.log)
        history = [one["what"] for one in status(both, "w1")["history"]]
        assert history[-2:] == ["reboot", "rebooted"]
        assert status(both, "w2")["goal"] == "up"
    assert both.controller.run("srun", "-w", "w1", "--chdir=/tmp", "hostname", user="demo").strip() == "w1"
