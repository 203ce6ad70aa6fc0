"""Goals that users set for a machine, between a real API server, a real Slurm, and a real receiver of webhooks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.apiserver import install
from tests.support.both_sides import PODS, READY, Both, Running, both_sides
from tests.support.webhook_receiver import TAKES, Answers, Receiver
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

MACHINES = "/apis/minivm.io/v1alpha1/namespaces/default/machines"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
TICKET = {"template": {"spec": {"containers": [{"name": "ticket", "image": "x"}]}}}
REMEDIES = {"reboot": {"annotate": {"reboot.example/please": "now"}}, "replace": {"job": TICKET}}


class Kept(Both):
    receiver: Receiver
    # At each call: its key, and whether its answer was noted already.
    called: list[tuple[str, bool]]

    def treats(self) -> None:
        """Whoever is told of a machine that is to go down is asked by a webhook."""
        down = {"webhook": {"url": f"http://127.0.0.1:{self.receiver.port}/down"}}
        remedies = {**REMEDIES, "down": down}
        self.policy.write_text(json.dumps({"machines": {"mode": "act", "remedies": remedies}}))

    def hears(self, answer: Answers) -> None:
        def answers(way: socket.socket) -> object:
            _, _, said = self.receiver.asked[-1]
            remedy = self.api.ask("GET", f"{MACHINES}/{said['machine']}")["status"]["remedy"]
            self.called.append((said["key"], bool(remedy.get("done"))))
            return answer(way)

        self.receiver.answers, self.called = answers, []

    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_MACHINES="yes", **more)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with both_sides(tmp_path_factory.mktemp("goals"), "goals", Kept) as found:
        install(found.api)
        found.receiver = Receiver()
        for name in found.workers:
            boots(found, name, "first")
        yield found
        found.receiver.ended.set()
        found.receiver.socket.close()


def boots(both: Both, name: str, boot: str) -> None:
    both.api.merge(f"/api/v1/nodes/n-{name}/status", {"status": {"nodeInfo": {"bootID": boot}}})


DEEP = """import json; from init.helpers import conditions as c
print(json.dumps(c.deep_condition(c.read_results(c.DEEP_FILE), {boot!r})))"""
# A check of the site's own; what it says stands in a file.
CHECK = """#!/bin/sh
# minivm-check: {"about": "a stand-in", "class": "manual", "when": ["deep"]}
cat /etc/deep; [ "$(cat /etc/deep)" = well ] || exit 80
"""


def tells(both: Both, name: str, item: dict[str, Any]) -> None:
    """As its pod does of itself."""
    now = {**READY, "type": "minivm.io/DeepCheck", **item}
    kind = "application/strategic-merge-patch+json"
    both.api.ask("PATCH", f"{PODS}/{name}/status", {"status": {"conditions": [now]}}, kind=kind)


def begins(both: Both, name: str, says: str) -> dict[str, Any]:
    """The pod does, after a boot: its containers are made anew. What its own service finds, as it is to be told."""
    pod = both.workers[name]
    pod.run("sh", "-c", f"echo {says} > /etc/deep; rm -rf /run/minivm/health /run/minivm/verdicts")
    pod.container.kill()
    pod.container.start()
    pod.wait_ready()
    boot = pod.run("cat", "/proc/sys/kernel/random/boot_id").strip()
    words = ("/opt/minivm/bin/python3", "-c", DEEP.format(boot=boot))

    def told() -> dict[str, Any]:
        found: dict[str, Any] | None = json.loads(pod.run(*words))
        return found if found is not None and found["reason"] != "Running" else {}

    found = until(told, "it has checked its machine deeply", seen=pod.account)
    # All of these machines are one, which does not boot: the Node's word for it is a test's.
    return {**found, "message": found["message"].removeprefix(boot)}


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
    """Tell whether the fleet cordons the Node, and return its annotations."""
    found = both.api.ask("GET", f"/api/v1/nodes/n-{name}")
    labels, annotations = (found["metadata"].get(key) or {} for key in ("labels", "annotations"))
    ours = "minivm.node-restriction.kubernetes.io/cordoned" in labels
    return ours and bool(found["spec"].get("unschedulable")), annotations


def is_back(both: Both, name: str) -> bool:
    return not both.reason(name) and node(both, name) == (False, {}) and status(both, name)["goal"] == "up"


def test_a_reboot_waits_for_the_job_is_asked_for_and_seen(both: Kept) -> None:
    both.treats()
    words = ("sbatch", "--parsable", "-w", "w1", "--chdir=/tmp", "--wrap", "sleep 7777")
    job = both.controller.run(*words, user="demo").strip()
    until(lambda: both.controller.run("squeue", "-h", "-o", "%t").split() == ["R"], "the job runs")
    with both.running():
        wants(both, "w1", "reboot", "new kernel")
        wanted = "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass"
        until(lambda: both.reason("w1") == wanted, "drained", seen=both.log)
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
        until(
            lambda: "has reported no deep check" in status(both, "w1")["why"], "its proof is waited for", seen=both.log
        )
        assert both.reason("w1"), "it gets no jobs until then"
        tells(both, "w1", {"message": "second 0"})
        until(lambda: is_back(both, "w1"), "all is lifted", seen=both.log)
        history = [one["what"] for one in status(both, "w1")["history"]]
        assert history[-2:] == ["reboot", "rebooted"]
        assert status(both, "w2")["goal"] == "up"
    assert both.controller.run("srun", "-w", "w1", "--chdir=/tmp", "hostname", user="demo").strip() == "w1"


def test_its_own_pod_proves_a_machine_that_was_rebooted_or_says_that_it_is_ill(both: Kept) -> None:
    """The worker's health service does the check that the fleet's drain requests when its pod begins."""
    both.treats()
    place = "/usr/share/minivm/scripts/health.d/stand_in"
    both.workers["w1"].run("sh", "-c", f"printf %s '{CHECK}' > {place}; chmod 755 {place}")
    with both.running():
        wants(both, "w1", "reboot", "fan 3")
        until(lambda: status(both, "w1").get("remedy", {}).get("done"), "it is asked for", seen=both.log)
        boots(both, "w1", "third")
        ill = begins(both, "w1", "ill")
        assert (ill["status"], ill["message"]) == ("False", " 0 stand_in[manual]@zero ill")
        tells(both, "w1", {**ill, "message": f"third{ill['message']}"})
        until(lambda: status(both, "w1").get("verdict") == "stand_in[manual]@zero ill", "noted", seen=both.log)
        until(lambda: status(both, "w1").get("remedy", {}).get("done"), "and asked for again", seen=both.log)
        history = [one["what"] for one in status(both, "w1")["history"]]
        assert history[-4:] == ["reboot", "verdict", "failed", "reboot"]
        assert both.reason("w1") and node(both, "w1")[0], "it stays"
        boots(both, "w1", "fourth")
        well = begins(both, "w1", "well")
        assert (well["status"], well["message"]) == ("True", " 0 stand_in")
        assert both.reason("w1"), "the boot that it names counts"
        tells(both, "w1", {**well, "message": f"fourth{well['message']}"})
        until(lambda: is_back(both, "w1"), "all is lifted", seen=both.log)
    both.workers["w1"].run("rm", place)
    assert both.controller.run("srun", "-w", "w1", "--chdir=/tmp", "hostname", user="demo").strip() == "w1"


# Killed again and again


def asks(goal: str, both: Both) -> None:
    wants(both, "w2", goal, "fan 3")


def held(both: Both, why: str) -> bool:
    here = status(both, "w2")
    said = both.reason("w2").startswith("minivm: fleet: goal") and node(both, "w2")[0]
    return said and here.get("why", "").endswith(why) and both.free("w2")


def treated(both: Both, why: str) -> bool:
    return held(both, why) and bool(status(both, "w2")["remedy"].get("done"))


def reboots(both: Both) -> None:
    boot = str(status(both, "w2")["remedies"] + 1)
    boots(both, "w2", boot)
    tells(both, "w2", {"message": f"{boot} 1 dcgm_diag"})


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
    boots(both, "w2", "another")
    tells(both, "w2", {"message": "another 1 dcgm_diag"})


# What happens, how it shows that all that follows was done, and what is noted of the machine.
STORIES: dict[str, tuple[list[tuple[Callable[[Both], object], Callable[[Both], bool]]], list[str]]] = {
    "drain": ([(partial(asks, "drain"), partial(held, why="fan 3")), (partial(asks, "up"), back)], []),
    "reboot": (
        [(partial(asks, "reboot"), partial(treated, why="to be well after it")), (reboots, back)],
        ["reboot", "rebooted"],
    ),
    "down": (
        [(partial(asks, "down"), partial(treated, why="is out of service")), (partial(asks, "up"), back)],
        ["down", "withdrawn"],
    ),
    "replace": (
        [
            (partial(asks, "replace"), partial(treated, why="waits for the replacement")),
            (is_exchanged, is_away),
            (another_comes, lambda both: status(both, "w2").get("state") == "TakesJobs" and back(both)),
        ],
        ["node"],
    ),
}


def settled(both: Both, fleet: Running, all_is: Callable[[Both], bool]) -> bool:
    return fleet.there() and all_is(both)


@pytest.mark.parametrize("story", STORIES)
def test_a_goal_ends_the_same_where_the_fleet_is_killed_after_every_single_change(both: Kept, story: str) -> None:
    """Drained, cordoned, told, done once, seen and lifted, each step by another fleet."""
    both.treats()
    both.hears(TAKES)
    with both.running():
        until(lambda: status(both, "w2").get("state") == "TakesJobs" and back(both), "it is kept", seen=both.log)
    kept, jobs = machine(both, "w2"), both.api.ask("GET", JOBS)["items"]
    before = kept["status"]
    parts, noted = STORIES[story]
    with both.running(cut=2, again=2) as fleet:
        for happens, all_is in parts:
            happens(both)
            until(partial(settled, both, fleet, all_is), f"all is done: {story}", within=300, seen=both.log)
        until(lambda: fleet.there() and both.ask("plan") == "nothing to do\n", "it is over", seen=both.log)
        assert fleet.killed > 8, "a story in which little is done shows little"
    after = status(both, "w2")
    another = machine(both, "w2")["metadata"]["uid"] != kept["metadata"]["uid"]
    assert another == (story == "replace")
    had = [] if another else [one["what"] for one in before["history"]]
    found = [one["what"] for one in after["history"]][len(had) :]
    # What was counted before, by the stories before this one.
    assert [what for what in found if what != "forgiven"] == noted, "once, and no more"
    assert after["remedies"] - (0 if another else before["remedies"]) == (story in ("reboot", "down"))
    assert (bool(both.called), {noted for _, noted in both.called} <= {False}) == (story == "down", True)
    assert len({key for key, _ in both.called}) <= 1
    assert len(both.api.ask("GET", JOBS)["items"]) - len(jobs) == (story == "replace")


def test_a_webhook_whose_answer_nobody_heard_is_called_again_with_its_key_and_then_no_more(both: Kept) -> None:
    both.treats()
    with both.running() as fleet:
        alive = [fleet.process]

        def kills(way: socket.socket) -> None:
            """The first one that asks: he takes it, and nobody hears so."""
            while alive:
                alive.pop().kill()
            TAKES(way)

        both.hears(kills)
        wants(both, "w2", "down", "fan 3")
        until(partial(settled, both, fleet, partial(treated, why="is out of service")), "it is done", seen=both.log)
        assert fleet.killed == 1
        assert [noted for _, noted in both.called] == [False, False], both.log()
        assert len({key for key, _ in both.called}) == 1
    before = len(both.log())
    with both.running():
        until(lambda: "is out of service" in both.log()[before:], "a third one has looked at it", seen=both.log)
        wants(both, "w2", "up", "fan 4")
        until(lambda: back(both), "all is lifted", seen=both.log)
    assert len(both.called) == 2, "once it is noted nobody is called"
