"""A worker whose machine can die between a real API server and a real Slurm: its container is the machine.

No kubelet and no controller of StatefulSets run here. A machine that is there refuses its kubelet's port, and a refusal
is an answer; one that is killed answers nobody. What Kubernetes would make of that, its tests write.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fleet.world.kubernetes import RESTART
from init.helpers.configwatch import REQUEST_DIRECTORY, REQUEST_FILE
from tests.container.init_pods import Pod, World
from tests.kubernetes.apiserver import ApiServer, Object
from tests.support.both_sides import LABELS, PODS, READY, Both
from tests.waiting import until

NAME = "w-0"
# A machine that has no worker and is well.
OTHER = "n-other"
NODES = "/api/v1/nodes"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
OUT = "node.kubernetes.io/out-of-service"
FENCED = "minivm.node-restriction.kubernetes.io/fenced"
LONG_AGO = READY["lastTransitionTime"]
SOON = {"gone": 1, "notReady": 1, "dead": 2, "lost": 1, "fencing": "act"}


class Rows(Both):
    names = (NAME, "w1")
    # slurmctld looks after its nodes three times as often.
    conf = ("SlurmdTimeout=9",)

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        self.addresses: dict[str, str] = {}
        (slurm.mounts / REQUEST_DIRECTORY.name).mkdir()
        super().__init__(api, slurm, directory)
        template = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "w", "image": "x"}]}}
        spec = {"replicas": 1, "selector": {"matchLabels": LABELS}, "serviceName": "w", "template": template}
        self.api.ask("POST", SETS, {"metadata": {"name": "w", "labels": LABELS}, "spec": spec})
        self.api.ask("POST", NODES, {"metadata": {"name": OTHER}})
        for node in (OTHER, *(f"n-{name}" for name in self.names)):
            self.api.ask("POST", LEASES, {"metadata": {"name": node}})
        # Another machine than the fleet's own.
        elsewhere = self.rest.partition(":")[0]
        well = {"conditions": [READY], "addresses": [{"type": "InternalIP", "address": elsewhere}]}
        self.api.merge(f"{NODES}/{OTHER}/status", {"status": well})
        self.mend()

    def worker(self, name: str) -> Pod:
        asked = self.directory / "asked" / name
        asked.mkdir(parents=True, exist_ok=True)
        env = {"MINIVM_ACCOUNTING": "none"}
        return self.slurm.pod("worker", name, env=env, volumes={asked: str(REQUEST_DIRECTORY)})

    # What happens.

    def says(self, name: str, ready: str, *, renewed: bool | None = None, further: Sequence[Object] = ()) -> None:
        """Write the Node's status as its kubelet, or the node controller, does."""
        conditions = [{**READY, "status": ready}, *further]
        addresses = [{"type": "InternalIP", "address": self.address(name)}]
        self.api.merge(f"{NODES}/n-{name}/status", {"status": {"conditions": conditions, "addresses": addresses}})
        # For as long as a test lasts.
        now = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(time.time() + 600))}.000000Z"
        lives = ready == "True" if renewed is None else renewed
        self.api.merge(f"{LEASES}/n-{name}", {"spec": {"renewTime": now if lives else f"{LONG_AGO[:-1]}.000000Z"}})

    @contextlib.contextmanager
    def meanwhile(self, does: Callable[[int], object]) -> Iterator[None]:
        """What its kubelet does twice a second."""
        over = threading.Event()

        def again() -> None:
            for number in itertools.count():
                does(number)
                if over.wait(0.5):
                    return

        thread = threading.Thread(target=again)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def renewing(self, name: str = NAME) -> contextlib.AbstractContextManager[None]:
        """Its kubelet is not ready, and goes on to renew its lease."""

        def renew(number: int) -> None:
            self.api.merge(f"{LEASES}/n-{name}", {"spec": {"renewTime": f"{LONG_AGO[:-1]}.{number:06d}Z"}})

        return self.meanwhile(renew)

    def showing(self) -> contextlib.AbstractContextManager[None]:
        """Its kubelet shows the worker what is asked of it."""
        file = self.directory / "asked" / NAME / REQUEST_FILE

        def show(_: int) -> None:
            if (word := self.asked()) != (file.read_text() if file.exists() else ""):
                fresh = file.with_name("fresh")
                fresh.write_text(word)
                fresh.rename(file)

        return self.meanwhile(show)

    def dies(self, name: str = NAME) -> None:
        self.workers[name].container.kill()
        self.says(name, "Unknown")

    def starts(self, name: str = NAME) -> None:
        self.workers[name].container.start()
        self.workers[name].wait_ready()

    def moves(self) -> str:
        """Its next container is on another machine; its address there."""
        old = self.workers[NAME].container
        old.rename(f"{old.name}-before")
        self.workers[NAME] = self.worker(NAME)
        # It has its address by now, which is another one.
        old.kill()
        self.workers[NAME].add_user()
        self.workers[NAME].wait_ready()
        return self.address(NAME)

    def well(self) -> None:
        """The machine is there again, and the next pod is on it."""
        self.starts()
        self.says(NAME, "True")
        self.comes()

    def comes(self, node: str = "") -> None:
        """The next pod of its name."""
        self.goes()
        self.new_pod(NAME, node)

    def new_pod(self, name: str, node: str = "") -> None:
        super().new_pod(name, node)
        self.api.merge(f"{PODS}/{name}/status", {"status": {"podIP": self.address(name)}})

    def goes(self, name: str = NAME) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.ask("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")

    def scale(self, count: int) -> None:
        self.api.merge(f"{SETS}/w", {"spec": {"replicas": count}})

    def leave(self, why: str | None = "new template") -> None:
        self.api.merge(f"{PODS}/{NAME}", {"metadata": {"annotations": {"minivm.io/leave": why}}})

    def taint(self, *keys: str) -> None:
        self.api.merge(
            f"{NODES}/n-{NAME}", {"spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in keys]}}
        )

    def policy_is(self, **changes: object) -> None:
        self.policy.write_text(json.dumps({**SOON, **changes}))

    def submit(self, *words: str) -> str:
        more = ("--parsable", "-w", NAME, "--chdir=/tmp", *words, "--wrap", "sleep 7777")
        job = self.controller.run("sbatch", *more, user="demo").strip()
        until(lambda: self.job(job) == "R", "the job runs")
        return job

    # What there is.

    def address(self, name: str) -> str:
        """Return the worker's address, as it was when it last ran."""
        container = self.workers[name].container
        container.reload()
        found = str(container.attrs["NetworkSettings"]["Networks"][self.slurm.network.name]["IPAddress"])
        self.addresses[name] = found or self.addresses[name]
        return self.addresses[name]

    def pod(self) -> Object | None:
        with contextlib.suppress(urllib.error.HTTPError):
            found = self.api.ask("GET", f"{PODS}/{NAME}")
            return None if "deletionTimestamp" in found["metadata"] else found
        return None

    def there(self) -> bool:
        return self.pod() is not None

    def asked(self) -> str:
        """When its slurmd was asked to restart."""
        return str(((self.pod() or {}).get("metadata", {}).get("annotations") or {}).get(RESTART, ""))

    def known(self, name: str = NAME) -> bool:
        return f"NodeName={name} " in self.controller.code("scontrol", "show", "nodes")[1]

    def idle(self, name: str) -> bool:
        return self.node(name)["state"] == "IDLE"

    def flags(self) -> set[str]:
        return set(self.node(NAME)["state"].split("+")) - {"NOT_RESPONDING"}

    def job(self, number: str) -> str:
        return self.controller.run("squeue", "-h", "-j", number, "-o", "%t").strip()

    def given_up(self) -> bool:
        found = self.api.ask("GET", f"{NODES}/n-{NAME}")
        ours = bool(found["metadata"].get("labels", {}).get(FENCED) == "true")
        # Of one answer: the fleet may change both between two.
        assert ours == (OUT in taints_of(found)), "both or none"
        return ours

    def taints(self) -> set[str]:
        return taints_of(self.api.ask("GET", f"{NODES}/n-{NAME}"))

    def cordoned(self) -> bool:
        return bool(self.api.ask("GET", f"{NODES}/n-{NAME}")["spec"].get("unschedulable"))

    def takes_jobs(self) -> bool:
        """And nothing is left of what there was."""
        return (
            self.known()
            and self.node(NAME)["state"] == "IDLE"
            and self.shown(NAME) == "TakesJobs"
            and "Comment" not in self.node(NAME)
            and not self.given_up()
            and not self.free(NAME)
        )

    def mend(self) -> None:
        """Restore the initial state, whatever a test has done."""
        (self.directory / "fleet.log").write_text("")
        self.policy_is()
        self.scale(1)
        for job in self.controller.run("squeue", "-h", "-o", "%i").split():
            self.controller.code("scancel", job)
        for name, pod in self.workers.items():
            pod.container.reload()
            if pod.container.status == "running" and not self.known(name):
                pod.container.kill()
            if pod.container.status != "running" or not self.known(name):
                self.starts(name)
            none = {"labels": {FENCED: None}, "annotations": None}
            self.api.merge(f"{NODES}/n-{name}", {"metadata": none, "spec": {"unschedulable": None, "taints": None}})
            self.says(name, "True")
            self.goes(name)
            self.new_pod(name)
            for state in ("resume", "undrain"):
                self.controller.code("scontrol", "update", f"nodename={name}", f"state={state}")
            self.controller.code("scontrol", "update", f"nodename={name}", "comment=")
            until(partial(self.idle, name), f"{name} is idle", seen=self.log)


def taints_of(node: Object) -> set[str]:
    return {one["key"] for one in node["spec"].get("taints", [])}
