"""Measure the fleet at a large site's size.

It has a real API server with that many Nodes and pods, a real slurmctld and slurmrestd with that many nodes, and no
machines.

`python -m bench fleet`. Needs root and the controller's and worker's images; MINIVM_BENCH_NODES sets the number, 5,000
by default. The bench plays the kubelets, which report each Node's status every five minutes. The first 2,000 of
Slurm's nodes (MINIVM_BENCH_SLURMD), or as many as fit, have a real slurmd: one that knows 5,000 nodes takes 9 MB and
13 threads, 2,000 of them 18 GB. The rest are CLOUD nodes, powered down: the fleet can drain them like others.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench import fleet_nodes
from bench.fleet_nodes import LEASE, FleetProcess
from fleet.act.slurm_client import SlurmClient
from fleet.policy import STATE
from fleet.world import slurm
from fleet.world.kubernetes import make_fleet_mark
from fleet.world.slurm import Precondition
from tests.container.init_pods import slurm_conf, world
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, api_server
from tests.waiting import until

NODES = int(os.environ.get("MINIVM_BENCH_NODES", "5000"))
SLURMD = 2000
CORDONS, IDLE_S = 100, 30.0
# What was shown before may be shown in other words: idle it is when nothing was written for so long.
CALM_S = 5.0
# Of the machines, within a minute, and what the fleet does until a minute after that.
SHARE, WITHIN_S, LATER_S = 0.3, 60.0, 80.0
# Each kubelet writes its Node's status so often when nothing changes.
HEARTBEAT_S = 300.0
HANDS = 8
JWT = ("AuthAltTypes=auth/jwt", "AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key")
UNTOUCHED, LIFTED = (
    Precondition(drained=False, down=False, reason=reason, comment="") for reason in ("", slurm.LIFTED)
)
STRATEGIC = "application/strategic-merge-patch+json"
LABELS = {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm", "minivm.io/pool": "w"}
WORKER = {**LABELS, "app.kubernetes.io/component": "worker"}
SINCE = "2026-11-20T00:00:00Z"
# As a fleet before it has left it, on a pod and, where it says whose it is, on a Node.
SHOWN = {"type": STATE, "status": "True", "reason": "TakesJobs", "lastTransitionTime": SINCE}
BESIDE = {**SHOWN, "message": make_fleet_mark("default", "slurm")}


class Site:
    """A site of Nodes with a worker's pod each, w-0 on n-0, and as many nodes in Slurm."""

    def __init__(self, api: ApiServer, rest: str, key: Path, directory: Path, size: int) -> None:
        self.api, self.rest, self.key, self.directory, self.size = api, rest, key, directory, size
        self.slurm = SlurmClient(rest, key)
        self.policy = directory / "policy.json"
        self._own = threading.local()
        self.stop = threading.Event()
        self.silent: set[int] = set()

    def ask(self, method: str, path: str, body: object = None) -> None:
        """Send a request on the thread's own connection: a handshake would cost more than the request."""
        if not hasattr(self._own, "to"):
            host, port = self.api.url.removeprefix("https://").split(":")
            self._own.to = http.client.HTTPSConnection(host, int(port), context=self.api.context, timeout=60)
        kind = STRATEGIC if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self.api.token}", "Content-Type": kind}
        self._own.to.request(method, path, None if body is None else json.dumps(body), headers)
        reply = self._own.to.getresponse()
        text = reply.read()
        assert reply.status < 300, (method, path, reply.status, text[:500])

    def fill(self) -> None:
        self.ask("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        self.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/default/leases", {"metadata": {"name": LEASE}})
        template = {"metadata": {"labels": WORKER}, "spec": {"containers": [{"name": "w", "image": "x"}]}}
        spec = {"replicas": self.size, "selector": {"matchLabels": WORKER}, "serviceName": "w", "template": template}
        sets = "/apis/apps/v1/namespaces/default/statefulsets"
        self.ask("POST", sets, {"metadata": {"name": "w", "labels": WORKER}, "spec": spec})
        with ThreadPoolExecutor(HANDS) as hands:
            list(hands.map(self.make, range(self.size)))

    def make(self, number: int) -> None:
        pods = "/api/v1/namespaces/default/pods"
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": f"n-{number}"}, "status": status(True, BESIDE)})
        spec = {"nodeName": f"n-{number}", "containers": [{"name": "worker", "image": "x"}]}
        self.ask("POST", pods, {"metadata": {"name": f"w-{number}", "labels": WORKER}, "spec": spec})
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": SINCE}
        running = {"phase": "Running", "conditions": [ready, SHOWN]}
        self.ask("PATCH", f"{pods}/w-{number}/status", {"status": running})

    def heartbeats(self) -> None:
        """Report the status of all healthy kubelets, one after the other."""
        begun, sent = time.monotonic(), 0
        while not self.stop.wait(max(0.0, begun + sent * HEARTBEAT_S / self.size - time.monotonic())):
            if (number := sent % self.size) not in self.silent:
                self.says(number, ready=True)
            sent += 1

    def says(self, number: int, *, ready: bool) -> None:
        """Patch a Node's own conditions only, keeping those that the fleet set."""
        body = {"status": status(ready)}
        self.ask("PATCH", f"/api/v1/nodes/n-{number}/status", body)

    def cordon(self, number: int, *, on: bool = True) -> None:
        self.ask("PATCH", f"/api/v1/nodes/n-{number}", {"spec": {"unschedulable": on or None}})

    def drained(self, number: int) -> bool:
        return not self.slurm.is_unchanged(f"w-{number}", UNTOUCHED)

    def undrained(self, number: int) -> bool:
        return self.slurm.is_unchanged(f"w-{number}", LIFTED)


def status(ready: bool, *more: dict[str, str]) -> dict[str, object]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    well = dict.fromkeys(("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"), "False")
    conditions = {**well, "Ready": "True" if ready else "Unknown"}
    since = dict.fromkeys(conditions, SINCE) | ({} if ready else {"Ready": now})
    listed = [
        {"type": kind, "status": state, "lastHeartbeatTime": now, "lastTransitionTime": since[kind]}
        for kind, state in conditions.items()
    ]
    return {"conditions": [*listed, *more]}


@contextlib.contextmanager
def site(directory: Path, size: int, many: int = 0) -> Iterator[Site]:
    """Start a site; `many` of its nodes have a slurmd."""
    (directory / "slurm").mkdir()
    with api_server(programs.build(), directory) as api, world(directory / "slurm", "scale") as slurm:
        (slurm.mounts / "secrets" / "slurm").mkdir()
        key = slurm.mounts / "secrets" / "slurm" / "jwt_hs256.key"
        key.write_bytes(os.urandom(32))
        asleep = ("ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1")
        nodes = (*fleet_nodes.lines(size, many), *asleep)
        conf = re.sub("MaxNodeCount=[0-9]+", f"MaxNodeCount={size + 1}", slurm_conf(*JWT, *nodes, accounting=False))
        conf = fleet_nodes.suited(conf) if many else conf
        slurm.configure({"slurm.conf": conf})
        begun = time.monotonic()
        behind = fleet_nodes.start(slurm, conf, directory, many) if many else None
        env = {"MINIVM_ACCOUNTING": "none", "MINIVM_SLURMRESTD": "0.0.0.0:6820"}
        controller = slurm.pod("controller", "slurm-controller", env=env).wait_ready(180)
        controller.container.reload()
        at = controller.container.attrs["NetworkSettings"]["Networks"][slurm.network.name]["IPAddress"]
        built = Site(api, f"{at}:6820", key, directory, size)
        built.fill()
        until(lambda: len(built.slurm.look(jobs=False).nodes) == size, "slurmctld knows them", within=120)
        if behind:
            idle = partial(controller.run, "sinfo", "--noheader", "--responding", "--states=idle", "--format=%D")
            until(lambda: int(idle() or 0) >= many, "each slurmd has registered", within=900, seen=behind.logs)
            row(f"{many} slurmd, until the last one has registered, from the first one's start", since(begun), "s")
        beating = threading.Thread(target=built.heartbeats)
        beating.start()
        try:
            yield built
        finally:
            built.stop.set()
            beating.join()


def main() -> int:
    many = fleet_nodes.chosen(NODES, SLURMD)
    if many < SLURMD:
        print(f"running {many} of {SLURMD} slurmd: as many as requested, or as fit", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="minivm-bench-") as directory,
        site(Path(directory), NODES, many) as bench_site,
    ):
        fleet = FleetProcess(bench_site)
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.end)
            known_by(bench_site, fleet)
            # It waits for the Lease.
            other = FleetProcess(bench_site, "other")
            stack.callback(other.end)
            measure(bench_site, fleet, other)
    return 0


def known_by(made: Site, fleet: FleetProcess) -> None:
    begun = time.monotonic()
    until(partial(known, made, fleet), "both sides are known", within=300, seen=fleet.log.read_text)
    row(f"{made.size} Nodes, pods and nodes of Slurm, from its start to known and decided on", since(begun), "s")
    row("memory, and at its most", fleet.memory("VmRSS"), "MB", f"{fleet.memory('VmHWM'):.0f}")


def measure(made: Site, fleet: FleetProcess, other: FleetProcess) -> None:
    until(lambda: other.metric("known", '{side="kubernetes"}'), "the other one follows", seen=other.log.read_text)
    calm(fleet)
    used, waits = idle(fleet, other)
    row("of a processor, nothing happens but heartbeats", used * 100, "%")
    row("the same of the one that waits for the Lease", waits * 100, "%", f"{other.memory('VmRSS'):.0f} MB")
    cordons(made)
    mass(made, fleet)
    row("memory after all that, and at its most", fleet.memory("VmRSS"), "MB", f"{fleet.memory('VmHWM'):.0f}")


def calm(fleet: FleetProcess) -> None:
    """Wait until the fleet has done its initial work."""
    before = -1
    while before != (before := sum(fleet.done(verb) for verb in ("showonpod", "showonnode", "drain", "undrain"))):
        time.sleep(CALM_S)


def known(made: Site, fleet: FleetProcess) -> bool:
    return fleet.metric("workers") == made.size and fleet.metric("known", '{side="slurm"}') == 1


def idle(*fleets: FleetProcess) -> list[float]:
    before, begun = [fleet.processor() for fleet in fleets], time.monotonic()
    time.sleep(IDLE_S)
    took = since(begun)
    return [(fleet.processor() - was) / took for fleet, was in zip(fleets, before, strict=True)]


def cordons(made: Site) -> None:
    """Cordon machines one after the other, measuring each drain; then take all cordons back."""
    step = max(1, made.size // CORDONS)
    chosen, took = range(0, step * CORDONS, step), []
    for number in chosen:
        begun = time.monotonic()
        made.cordon(number)
        until(partial(made.drained, number), "it is drained")
        took.append(since(begun))
    took.sort()
    row(f"the load of this machine, of {os.cpu_count()} cores", os.getloadavg()[0], "")
    worst = f"p99 {took[int(len(took) * 0.99) - 1]:.2f}, worst {took[-1]:.2f}"
    row(f"a cordon seen in Slurm, median of {len(took)}", statistics.median(took), "s", worst)
    begun = time.monotonic()
    for number in chosen:
        made.cordon(number, on=False)
    for number in chosen:
        until(partial(made.undrained, number), "it is undrained")
    row(f"{len(took)} cordons lifted at once, the last one seen in Slurm", since(begun), "s")


def mass(made: Site, fleet: FleetProcess) -> None:
    """Silence a share of the machines within a minute, as a broken cable does; count the drains."""
    before, many = fleet.done("drain"), int(made.size * SHARE)
    begun = time.monotonic()
    for count in range(many):
        made.silent.add(count)
        made.says(count, ready=False)
        time.sleep(max(0.0, begun + (count + 1) * WITHIN_S / many - time.monotonic()))
    until(lambda: fleet.metric("stands", '{kind="pause"}'), "it pauses", within=200)
    time.sleep(max(0.0, begun + WITHIN_S + LATER_S - time.monotonic()))
    drains = fleet.done("drain") - before
    row(f"{many} machines silent within {WITHIN_S:.0f} s: drained until {LATER_S:.0f} s after that", drains, "")
    for line in fleet.log.read_text().splitlines():
        if line.startswith("fleet: of "):
            print(f"  {line}")


def row(what: str, value: float, unit: str, more: str = "") -> None:
    print(f"{what:<92} {value:8.2f} {unit:<2} {more}".rstrip(), flush=True)


def since(begun: float) -> float:
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
