"""A pool that grows and shrinks, between a real API server and a real Slurm: its workers are real, and begin and end as
its pods do. What a kubelet does a thread of the test does."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import Pod, World
from tests.kubernetes.apiserver import ApiServer, Object, install
from tests.support.both_sides import LABELS, PODS, READY, Both, both_sides
from tests.support.kube_elastic import NOW
from tests.support.kube_pools import KIND, POOLS
from tests.support.kube_topology import images
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

POOL = f"{POOLS}/slurm-gpu"


class Elastic(Both):
    """No worker to begin with."""

    names = ()
    # slurmctld looks after its nodes more often.
    conf = ("SlurmdTimeout=9",)

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        super().__init__(api, slurm, directory)
        install(api)
        self.policy.write_text(json.dumps({"gone": 5}))
        own = {key: said for key, said in LABELS.items() if not key.endswith("component")}
        template = {
            "metadata": {"labels": {"minivm.io/pool": "gpu"}},
            "spec": {"containers": [{"name": "x", "image": "x"}]},
        }
        elastic = {"min": 0, "max": 2, "idleSeconds": 5, "pendingSeconds": 1}
        spec = {"mode": "elastic", "elastic": elastic, "template": template}
        self.api.ask("POST", POOLS, {**KIND, "metadata": {"name": "slurm-gpu", "labels": own}, "spec": spec})
        self.over = threading.Event()
        self.failed: list[BaseException] = []
        self.kubelet = threading.Thread(target=self._kubelet)

    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_POOLS="yes", **more)

    @contextlib.contextmanager
    def kubelets(self) -> Iterator[None]:
        self.kubelet.start()
        try:
            yield
        finally:
            self.over.set()
            self.kubelet.join()

    def _kubelet(self) -> None:
        while not self.over.wait(0.3):
            try:
                for item in self.api.ask("GET", PODS)["items"]:
                    self._keep(item)
            except (urllib.error.URLError, TimeoutError):
                continue  # it is asked again
            except BaseException as error:
                self.failed.append(error)
                raise

    def _keep(self, item: Object) -> None:
        name, metadata = item["metadata"]["name"], item["metadata"]
        there: Pod | None = self.workers.get(name)
        if "deletionTimestamp" in metadata:
            if there is not None:
                there.container.stop(timeout=20)
                there.remove()
                del self.workers[name]
            self.api.ask("DELETE", f"{PODS}/{name}", NOW)
        elif not item["spec"].get("nodeName"):
            with contextlib.suppress(urllib.error.HTTPError):
                made = {"metadata": {"name": f"n-{name}"}, "status": {"conditions": [READY]}}
                self.api.ask("POST", "/api/v1/nodes", made)
            bound = {"metadata": {"name": name}, "target": {"kind": "Node", "name": f"n-{name}"}}
            self.api.ask("POST", f"{PODS}/{name}/binding", bound)
        elif there is None:
            self.workers[name] = self.worker(name)
            self.workers[name].add_user()
        elif item["status"].get("phase") != "Running" and there.ready():
            conditions = [READY, *item["status"].get("conditions", [])]
            self.api.merge(f"{PODS}/{name}/status", {"status": {"phase": "Running", "conditions": conditions}})

    # What people do.

    def size(self, **wants: int) -> None:
        self.api.merge(POOL, {"spec": {"elastic": wants}})

    def submit(self, *words: str) -> str:
        more = ("--parsable", "--chdir=/tmp", *words, "--wrap", "sleep 7777")
        return self.controller.run("sbatch", *more, user="demo").strip()

    # What there is.

    def there(self) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.api.ask("GET", PODS)["items"])

    def job(self, number: str) -> str:
        return self.controller.run("squeue", "-h", "-j", number, "-o", "%t").strip()

    def account(self) -> str:
        said = self.controller.run("squeue") + self.controller.run("sinfo", "-N", "-o", "%N %t %E")
        return f"{said}{self.failed}\n{json.dumps(self.api.ask('GET', POOL).get('status'))}\n{self.log()[-6000:]}"

    def states(self) -> dict[str, str]:
        lines = self.controller.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def asleep(self) -> bool:
        text = self.controller.run("sinfo", "-h", "-N", "-o", "%N %t %E")
        lines = [line for line in text.splitlines() if "grows again when jobs ask" in line]
        return self.there() == [] and len(lines) == 2


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    with both_sides(tmp_path_factory.mktemp("elastic"), "elastic", Elastic) as found, found.kubelets():
        yield found


class Newer(Elastic):
    """A Slurm that takes jobs for more nodes than it has seen."""

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        self.images = images("26.05")
        super().__init__(api, slurm, directory)


@pytest.fixture
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newer]:
    with both_sides(tmp_path_factory.mktemp("newer"), "newer", Newer) as found, found.kubelets():
        yield found


@pytest.mark.timeout(900)
def test_a_slurm_that_has_seen_no_worker_gets_them_by_its_first_job_whenever_the_fleet_is_killed(newer: Newer) -> None:
    """Killed before each second change of it, all the way; one job more than there may be is taken, and told."""
    names = ["slurm-gpu-0", "slurm-gpu-1"]
    with newer.running(cut=2, again=2) as fleet:

        def waited(what: str, then: Callable[[], object]) -> None:
            until(lambda: fleet.there() and then(), what, within=180, seen=newer.account)

        job = newer.submit("-N2")
        waited("the first job runs on both", lambda: newer.job(job) == "R")
        assert newer.there() == names
        newer.controller.run("scancel", job)
        waited("idle they go", newer.asleep)
        never, again = newer.submit("-N3"), newer.submit("-N1")
        waited("a job behind it runs on one", lambda: newer.job(again) == "R")
        assert newer.there() == names[:1] and newer.job(never) == "PD"
        waited("that it never can is told", lambda: ("slurm-gpu", "Fit") in newer.events())
        assert f"job {never} can never run here: it asks for 3 nodes, but max is 2" in newer.ask("why", "slurm-gpu")
        newer.controller.run("scancel", again)
        waited("nobody stays for it", newer.asleep)
        assert fleet.killed > 8


@pytest.mark.timeout(900)
def test_a_job_wakes_the_workers_that_it_asks_for_and_idle_ones_go_whenever_the_fleet_is_killed(both: Elastic) -> None:
    """Killed before each second change of it, all the way."""

    def waited(what: str, then: object, within: float = 180) -> None:
        until(lambda: fleet.there() and then(), what, within=within, seen=both.account)  # type: ignore[operator]  # a call

    with both.running(cut=2, again=2) as fleet:
        # Slurm 24.11 refuses what asks for more nodes than it has seen: so each is seen once.
        both.size(min=2)
        names = ["slurm-gpu-0", "slurm-gpu-1"]
        waited("both come", lambda: both.there() == names and both.states() == dict.fromkeys(names, "idle"))
        both.size(min=0)
        waited("idle they go, and are seen as what may come", both.asleep)
        job = both.submit("-N2")
        waited("the job runs on both", lambda: both.job(job) == "R")
        assert both.there() == names
        waited("it is noted", lambda: both.api.ask("GET", POOL)["status"]["wanted"] == 2)
        held = both.submit("-N1", "--hold")
        both.controller.run("scancel", job)
        waited("a job that is held keeps none", both.asleep)
        both.controller.run("scancel", held)
        assert fleet.killed > 8
        never = both.submit("-N1", "--hold")
        both.controller.run("scontrol", "update", f"jobid={never}", "numnodes=3")
        both.controller.run("scontrol", "release", never)
        waited("one that can never fit is told", lambda: "can never run here" in json.dumps(both.api.ask("GET", POOL)))
        waited("as an event, too, which comes after what is shown", lambda: ("slurm-gpu", "Fit") in both.events())
        assert both.there() == []
        assert f"job {never} can never run here: it asks for 3 nodes, but max is 2" in both.ask("why", "slurm-gpu")
