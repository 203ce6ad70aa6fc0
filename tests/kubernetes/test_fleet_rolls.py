"""A roll of a pool between a real API server and a real Slurm, the fleet killed between any two of its changes.

No kubelet runs here: what one makes of a pod that is made, or is to go, the test writes. The workers' containers stay.
"""

from __future__ import annotations

import contextlib
import urllib.error
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.apiserver import Object, install
from tests.support.both_sides import PODS, READY, Both, Running, both_sides
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

POOLS = "/apis/minivm.io/v1alpha1/namespaces/default/workerpools"
LABELS = {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}


class Rolls(Both):
    names = ("w-0", "w-1")

    def __init__(self, *words: Any) -> None:
        # By name, in the order of their births.
        self.born: dict[str, list[str]] = {name: [] for name in self.names}
        super().__init__(*words)

    def new_pod(self, name: str, node: str = "") -> None:
        """Its pool makes it."""

    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_POOLS="yes", **more)

    def wants(self, image: str = "", **spec: object) -> None:
        if image:
            spec["template"] = {"spec": {"containers": [{"name": "worker", "image": image}]}}
        self.api.merge(f"{POOLS}/w", {"spec": spec})

    def pods(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.api.ask("GET", PODS)["items"]}

    def kubelets(self) -> None:
        for name, pod in self.pods().items():
            with contextlib.suppress(urllib.error.HTTPError):  # it has gone, or has changed: looked at again
                if "deletionTimestamp" in pod["metadata"]:
                    self.api.ask("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
                elif not pod["spec"].get("nodeName"):
                    target = {"kind": "Node", "name": f"n-{name}"}
                    self.api.ask("POST", f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": target})
                    self.born[name].append(pod["metadata"]["uid"])
                elif pod["status"]["phase"] == "Pending":
                    said = {"phase": "Running", "conditions": [READY]}
                    self.api.merge(f"{PODS}/{name}/status", {"status": said})

    def images_are(self, **wanted: str) -> bool:
        """Each there, ready, and open for jobs or not as Slurm says."""
        found = {name: pod["spec"]["containers"][0]["image"] for name, pod in self.pods().items()}
        return found == {name.replace("_", "-"): image for name, image in wanted.items()}

    def open(self, *names: str) -> bool:
        return all(
            self.reason(name) == "" and "Comment" not in self.node(name)
            and not self.free(name) and self.shown(name) == "TakesJobs"
            for name in names
        )  # fmt: skip

    def stands(self) -> dict[str, str]:
        status = self.api.ask("GET", f"{POOLS}/w").get("status", {})
        return {one["type"]: one["status"] for one in status.get("conditions", [])}


WELL = {"Ready": "True", "Updated": "True"}


@pytest.fixture(scope="module")
def rolls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolls]:
    with both_sides(tmp_path_factory.mktemp("rolls"), "rolls", Rolls) as found:
        install(found.api)
        template = {"spec": {"containers": [{"name": "worker", "image": "one"}]}}
        pool = {"mode": "fixed", "replicas": 2, "template": template}
        made = {"apiVersion": "minivm.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "w", "labels": LABELS}}
        found.api.ask("POST", POOLS, {**made, "spec": pool})
        yield found


def settled(rolls: Rolls, fleet: Running, all_is: Callable[[], bool]) -> bool:
    rolls.kubelets()
    return fleet.there() and all_is()


def test_a_roll_ends_the_same_where_the_fleet_is_killed_after_every_single_change(rolls: Rolls) -> None:
    """Made, drained, waited for, freed, evicted, made and undrained, each step by another fleet."""
    with rolls.running(cut=2, again=2) as fleet:

        def comes(all_is: Callable[[], bool], what: str) -> None:
            until(partial(settled, rolls, fleet, all_is), what, within=240, seen=rolls.log)

        comes(lambda: rolls.images_are(w_0="one", w_1="one") and rolls.open("w-0", "w-1"), "both are made")
        comes(lambda: rolls.stands() == WELL, "and it is noted")
        words = ("sbatch", "--parsable", "-w", "w-0", "--chdir=/tmp", "--wrap", "sleep 7777")
        job = rolls.controller.run(*words, user="demo").strip()
        comes(lambda: rolls.controller.run("squeue", "-h", "-o", "%t").split() == ["R"], "a job runs")
        rolls.wants("two")
        comes(lambda: rolls.images_are(w_0="one", w_1="two") and rolls.open("w-1"), "who is idle is another one")
        comes(lambda: "update: template" in rolls.reason("w-0"), "who is busy takes no new job")
        told = rolls.controller.run("scontrol", "show", "job", job)
        assert "JobState=RUNNING" in told and "Restarts=0" in told
        rolls.controller.run("scancel", job)
        comes(lambda: rolls.images_are(w_0="two", w_1="two") and rolls.open("w-0", "w-1"), "then he is, too")
        comes(lambda: rolls.stands() == WELL, "and it is noted")
        assert [len(uids) for uids in rolls.born.values()] == [2, 2], "each was made anew once"
        rolls.wants(replicas=1)
        comes(lambda: rolls.images_are(w_0="two"), "one is too many, and goes")
        rolls.wants(replicas=2)
        comes(lambda: rolls.images_are(w_0="two", w_1="two") and rolls.open("w-0", "w-1"), "and comes back")
        comes(lambda: rolls.ask("plan") == "nothing to do\n", "nothing is left to do")
        assert [len(uids) for uids in rolls.born.values()] == [2, 3]
        assert fleet.killed > 12, "a story in which little is done shows little"
