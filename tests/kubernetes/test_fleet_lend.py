"""A pool that lends machines, between a real API server and a real Slurm with real workers and jobs. What the scheduler
and kubelets do a thread of the test does."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import Pod, World
from tests.kubernetes.apiserver import ApiServer, Object, install
from tests.support.both_sides import LABELS, PODS, READY, Both, both_sides
from tests.support.kube_elastic import NOW
from tests.support.kube_pools import KIND, POOLS
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

POOL = f"{POOLS}/slurm-gpu"
GUESTS = "/api/v1/namespaces/llm/pods"
GPU = "nvidia.com/gpu"
FULL = {"resources": {"limits": {GPU: "8"}}}
NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
LENDS = {"namespaces": ["llm"], "classes": ["inference"], "pools": {"gpu": 1.0}, "notice": 10}


class Lending(Both):
    """Two machines of 8 GPUs, and no worker to begin with."""

    names = ()
    conf = ("SlurmdTimeout=9",)

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        super().__init__(api, slurm, directory)
        install(api)
        self.policy.write_text(json.dumps({"gone": 5, "lend": LENDS}))
        for name in ("a", "b"):
            made = {"metadata": {"name": name, "labels": {"gpu": "yes"}}}
            room = {GPU: "8", "cpu": "64", "pods": "110"}
            self.api.ask("POST", "/api/v1/nodes", made)
            # The API server taints a new one as not ready, and what takes that away does not run here.
            self.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
            status = {"conditions": [READY], "capacity": room, "allocatable": room}
            self.api.merge(f"/api/v1/nodes/{name}/status", {"status": status})
        self.api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "llm"}})
        self.api.ask("POST", "/api/v1/namespaces/llm/serviceaccounts", {"metadata": {"name": "default"}})
        priority = {"metadata": {"name": "inference"}, "value": 1000, "preemptionPolicy": "Never"}
        self.api.ask("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", priority)
        own = {key: said for key, said in LABELS.items() if not key.endswith("component")}
        template = {
            "metadata": {"labels": {"minivm.io/pool": "gpu"}},
            "spec": {"containers": [{"name": "x", "image": "x", **FULL}]},
        }
        spec = {"mode": "perNode", "nodeSelector": {"gpu": "yes"}, "template": template}
        self.api.ask("POST", POOLS, {**KIND, "metadata": {"name": "slurm-gpu", "labels": own}, "spec": spec})
        self.over = threading.Event()
        self.failed: list[BaseException] = []
        self.thread = threading.Thread(target=self._others)

    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_POOLS="yes", MINIVM_FLEET_GUESTS="llm", **more)

    @contextlib.contextmanager
    def scheduling(self) -> Iterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            self.over.set()
            self.thread.join()

    def _others(self) -> None:
        while not self.over.wait(0.3):
            try:
                pods, guests = (self.api.ask("GET", where)["items"] for where in (PODS, GUESTS))
                taken = {one["spec"].get("nodeName") for one in [*pods, *guests]}
                for item in pods:
                    self._keep(item, taken)
                for item in guests:
                    free = sorted({"a", "b"} - taken)
                    if not item["spec"].get("nodeName") and free:
                        self._bind(GUESTS, item["metadata"]["name"], free[0])
                        taken.add(free[0])
            except (urllib.error.URLError, TimeoutError):
                continue  # it is asked again
            except BaseException as error:
                self.failed.append(error)
                raise

    def _bind(self, where: str, name: str, node: str) -> None:
        bound = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        self.api.ask("POST", f"{where}/{name}/binding", bound)

    def _keep(self, item: Object, taken: set[str]) -> None:
        name, metadata = item["metadata"]["name"], item["metadata"]
        there: Pod | None = self.workers.get(name)
        node = name.rpartition("-")[2]
        if "deletionTimestamp" in metadata:
            if there is not None:
                there.container.stop(timeout=20)
                there.remove()
                del self.workers[name]
            self.api.ask("DELETE", f"{PODS}/{name}", NOW)
        elif not item["spec"].get("nodeName"):
            if node not in taken:
                self._bind(PODS, name, node)
                taken.add(node)
        elif there is None:
            self.workers[name] = self.worker(name)
            self.workers[name].add_user()
        elif item["status"].get("phase") != "Running" and there.ready():
            conditions = [READY, *item["status"].get("conditions", [])]
            self.api.merge(f"{PODS}/{name}/status", {"status": {"phase": "Running", "conditions": conditions}})

    # What people do.

    def asks(self, name: str) -> None:
        spec = {"priorityClassName": "inference", "containers": [{"name": "x", "image": "x", **FULL}]}
        self.api.ask("POST", GUESTS, {"metadata": {"name": name}, "spec": spec})
        self.api.merge(f"{GUESTS}/{name}/status", {"status": {"phase": "Pending", "conditions": [NO_ROOM]}})

    def ends(self, name: str) -> None:
        self.api.ask("DELETE", f"{GUESTS}/{name}", NOW)

    def reserves(self, name: str, *flags: str) -> None:
        when = ("starttime=now+1day", "duration=1:00:00")
        said = ("reservationname=later", f"nodes={name}", "users=root", *when, *(f"flags={one}" for one in flags))
        self.controller.run("scontrol", "create", *said)

    # What there is.

    def where(self, name: str) -> str:
        return str(self.api.ask("GET", f"{GUESTS}/{name}")["spec"].get("nodeName", ""))

    def there(self) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.api.ask("GET", PODS)["items"])

    def ready(self) -> bool:
        status: Object = self.api.ask("GET", POOL).get("status", {})
        return status.get("ready") == 2

    def states(self) -> dict[str, str]:
        lines = self.controller.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: str) -> str:
        return self.controller.run("squeue", "-h", "-j", number, "-o", "%t").strip()

    def account(self) -> str:
        said = self.controller.run("squeue") + self.controller.run("sinfo", "-N", "-o", "%N %t %E")
        return f"{said}{self.failed}\n{json.dumps(self.api.ask('GET', POOL).get('status'))}\n{self.log()[-6000:]}"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lending]:
    with both_sides(tmp_path_factory.mktemp("lend"), "lend", Lending) as found, found.scheduling():
        yield found


@pytest.mark.timeout(900)
def test_who_finds_no_room_gets_the_idle_machine_then_the_busy_one_and_both_come_back(both: Lending) -> None:
    """The fleet is killed before each second change of it, all the way."""
    a, b = names = ["slurm-gpu-a", "slurm-gpu-b"]

    def waited(what: str, then: object, within: float = 180) -> None:
        until(lambda: fleet.there() and then(), what, within=within, seen=both.account)  # type: ignore[operator]  # a call

    with both.running(cut=2, again=2) as fleet:
        waited(
            "both come",
            lambda: both.there() == names and both.ready() and both.states() == dict.fromkeys(names, "idle"),
        )
        words = ("--parsable", "--chdir=/tmp", "-w", a, "--wrap", "sleep 7777")
        job = both.controller.run("sbatch", *words, user="demo").strip()
        waited("the job runs", lambda: both.job(job) == "R")
        both.reserves(b, "maint")
        both.asks("first")
        waited("the idle one is given away", lambda: both.where("first") == "b" and both.there() == [a])
        assert both.job(job) == "R" and both.reason(a) == ""
        assert both.reason(b).startswith("minivm: fleet: lend: wanted by llm/first of class inference at 2")
        assert "b: is lent to llm/first of class inference" in both.ask("why", "b")
        both.asks("second")
        waited("the busy one has notice", lambda: "wanted by llm/second of class inference at" in both.reason(a))
        waited("its job runs elsewhere when that is over", lambda: both.job(job) in ("PD", "CF"))
        waited("and then its machine is given away", lambda: both.where("second") == "a" and both.there() == [])
        said = json.dumps(both.api.ask("GET", POOL)["status"]["conditions"])
        assert "slurm-gpu-a to llm/second of class inference; slurm-gpu-b to llm/first of class inference" in said
        waited("events come after what is shown", lambda: {("b", "Lend"), (a, "Lend")} <= both.events())
        # Of what is done once a fleet that is killed before it tells it tells nothing.
        assert {(a, "Evicted"), (b, "Evicted")} & both.events()
        both.ends("first")
        waited("it comes back", lambda: both.there() == [b] and both.states().get(b) in ("idle", "alloc", "mix"))
        assert both.where("second") == "a"
        both.ends("second")
        both.controller.run("scancel", job)
        waited("and so does the other", lambda: both.states() == dict.fromkeys(names, "idle"))
        assert both.reason(a) == both.reason(b) == ""
        both.controller.run("scontrol", "delete", "reservation=later")
        both.reserves(a)
        both.asks("third")
        waited("what a reservation names is not given away", lambda: both.where("third") == "b" and both.there() == [a])
        assert fleet.killed > 4
