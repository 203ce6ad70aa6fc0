"""What people want of a machine, between a real API server and a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.apiserver import install
from tests.kubernetes.test_fleet import PODS, READY, Both, Running, both_sides
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

MACHINES = "/apis/minivm.io/v1alpha1/namespaces/default/machines"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
TICKET = {"template": {"spec": {"containers": [{"name": "ticket", "image": "x"}]}}}
REMEDIES = {"reboot": {"annotate": {"reboot.example/please": "now"}}, "replace": {"job": TICKET}}
TREATS = {"machines": {"mode": "act", "remedies": REMEDIES}}


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


# Killed again and again


def asks(goal: str, both: Both) -> None:
    wants(both, "w2", goal, "fan 3")


def held(both: Both, why: str) -> bool:
    here = status(both, "w2")
    said = both.reason("w2").startswith("minivm: fleet: goal: ") and node(both, "w2")[0]
    return said and here.get("why", "").endswith(why) and both.free("w2")


def treated(both: Both, why: str) -> bool:
    return held(both, why) and bool(status(both, "w2")["remedy"].get("done"))


def reboots(both: Both) -> None:
    boots(both, "w2", str(status(both, "w2")["remedies"] + 1))


def back(both: Both) -> bool:
    return is_back(both, "w2") and both.shown("w2") == "TakesJobs" and not both.free("w2")


def is_exchanged(both: Both) -> None:
    """Its Node goes with its pod, and another machine of the name comes with the next."""
    both.api.ask("DELETE", f"{PODS}/w2?gracePeriodSeconds=0")
    both.api.ask("DELETE", "/api/v1/nodes/n-w2")


def is_away(both: Both) -> bool:
    found = both.api.ask("GET", MACHINES)["items"]
    (one,) = [one["status"] for one in found if one["spec"].get("goal") == "replace"]
    return bool(one["state"] == "Absent" and one["history"][-1]["what"] == "left")


def another_comes(both: Both) -> None:
    for one in both.api.ask("GET", MACHINES)["items"]:
        if one["spec"].get("goal") == "replace":  # nobody forgets a machine but people
            both.api.ask("DELETE", f"{MACHINES}/{one['metadata']['name']}")
    both.api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n-w2"}, "status": {"conditions": [READY]}})
    both.new_pod("w2")


# What happens, how it shows that all that follows was done, and what is noted of the machine.
STORIES: dict[str, tuple[list[tuple[Callable[[Both], object], Callable[[Both], bool]]], list[str]]] = {
    "drain": ([(partial(asks, "drain"), partial(held, why="fan 3")), (partial(asks, "up"), back)], []),
    "reboot": (
        [(partial(asks, "reboot"), partial(treated, why="to be well after it")), (reboots, back)],
        ["reboot", "rebooted"],
    ),
    "replace": (
        [
            (partial(asks, "replace"), partial(treated, why="is waited for")),
            (is_exchanged, is_away),
            (another_comes, lambda both: status(both, "w2").get("state") == "TakesJobs" and back(both)),
        ],
        ["node"],
    ),
}


def settled(both: Both, fleet: Running, all_is: Callable[[Both], bool]) -> bool:
    return fleet.there() and all_is(both)


@pytest.mark.parametrize("story", STORIES)
def test_a_goal_ends_the_same_where_the_fleet_is_killed_after_every_single_change(both: Both, story: str) -> None:
    """Drained, cordoned, told, done once, seen and lifted, each step by another fleet."""
    both.policy.write_text(json.dumps(TREATS))
    with both.running():
        until(lambda: status(both, "w2").get("state") == "TakesJobs" and back(both), "it is kept", seen=both.log)
    kept, jobs = machine(both, "w2"), both.api.ask("GET", JOBS)["items"]
    before = kept["status"]
    parts, noted = STORIES[story]
    with both.running(cut=2, again=2) as fleet:
        for happens, all_is in parts:
            happens(both)
            until(partial(settled, both, fleet, all_is), f"all is done: {story}", within=180, seen=both.log)
        until(lambda: fleet.there() and both.ask("plan") == "nothing to do\n", "it is over", within=90, seen=both.log)
        assert fleet.killed > 8, "a story in which little is done shows little"
    after = status(both, "w2")
    another = machine(both, "w2")["metadata"]["uid"] != kept["metadata"]["uid"]
    assert another == (story == "replace")
    had = [] if another else [one["what"] for one in before["history"]]
    assert [one["what"] for one in after["history"]] == [*had, *noted], "once, and no more"
    assert after["remedies"] - (0 if another else before["remedies"]) == (story == "reboot")
    assert len(both.api.ask("GET", JOBS)["items"]) - len(jobs) == (story == "replace")
