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
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fleet.act.slurm_client import SlurmClient
from fleet.policy import STATE_CONDITION
from fleet.world import slurm
from fleet.world.kubernetes import make_fleet_mark
from fleet.world.slurm import Precondition
from tests.container.init_pods import IMAGES, LABELS, PREFIX, Pod, World, slurm_conf, world
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, api_server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
LEASE_NAME = "slurm-fleet"
NODES = int(os.environ.get("MINIVM_BENCH_NODES", "5000"))
SLURMD = 2000
CORDONS, IDLE_S = 100, 30.0
# The fleet may still reword what an earlier one showed: it is idle once it has written nothing for so long.
CALM_S = 5.0
# This share of the machines falls silent within a minute; drains are counted until LATER_S after that.
SHARE, WITHIN_S, LATER_S = 0.3, 60.0, 80.0
# Each kubelet writes its Node's status so often when nothing changes.
HEARTBEAT_S = 300.0
THREADS_TO_FILL = 8
JWT_LINES = ("AuthAltTypes=auth/jwt", "AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key")
UNTOUCHED, LIFTED = (
    Precondition(drained=False, down=False, reason=reason, comment="") for reason in ("", slurm.LIFTED)
)
STRATEGIC = "application/strategic-merge-patch+json"
WORKER = {
    "app.kubernetes.io/name": "minivm",
    "app.kubernetes.io/instance": "slurm",
    "minivm.io/pool": "w",
    "app.kubernetes.io/component": "worker",
}
SINCE = "2026-11-20T00:00:00Z"
# The conditions that an earlier fleet left, on a pod, and on a Node with the fleet's mark.
SHOWN_ON_POD = {"type": STATE_CONDITION, "status": "True", "reason": "TakesJobs", "lastTransitionTime": SINCE}
SHOWN_ON_NODE = {**SHOWN_ON_POD, "message": make_fleet_mark("default", "slurm")}


# The site: a real API server and a real slurmctld, without machines.


class Site:
    """A site of Nodes with a worker's pod each, w-0 on n-0, and as many nodes in Slurm."""

    def __init__(self, api: ApiServer, rest: str, key: Path, directory: Path, size: int) -> None:
        self.api, self.rest, self.key, self.directory, self.size = api, rest, key, directory, size
        self.slurm = SlurmClient(rest, key)
        self.policy = directory / "policy.json"
        self._own = threading.local()
        self.stop = threading.Event()
        self.silent: set[int] = set()

    def request(self, method: str, path: str, body: object = None) -> None:
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

    def create_objects(self) -> None:
        self.request("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        self.request(
            "POST", "/apis/coordination.k8s.io/v1/namespaces/default/leases", {"metadata": {"name": LEASE_NAME}}
        )
        template = {"metadata": {"labels": WORKER}, "spec": {"containers": [{"name": "w", "image": "x"}]}}
        spec = {"replicas": self.size, "selector": {"matchLabels": WORKER}, "serviceName": "w", "template": template}
        sets = "/apis/apps/v1/namespaces/default/statefulsets"
        self.request("POST", sets, {"metadata": {"name": "w", "labels": WORKER}, "spec": spec})
        with ThreadPoolExecutor(THREADS_TO_FILL) as pool:
            list(pool.map(self.create_worker, range(self.size)))

    def create_worker(self, number: int) -> None:
        pods = "/api/v1/namespaces/default/pods"
        self.request(
            "POST",
            "/api/v1/nodes",
            {"metadata": {"name": f"n-{number}"}, "status": make_node_status(True, SHOWN_ON_NODE)},
        )
        spec = {"nodeName": f"n-{number}", "containers": [{"name": "worker", "image": "x"}]}
        self.request("POST", pods, {"metadata": {"name": f"w-{number}", "labels": WORKER}, "spec": spec})
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": SINCE}
        running = {"phase": "Running", "conditions": [ready, SHOWN_ON_POD]}
        self.request("PATCH", f"{pods}/w-{number}/status", {"status": running})

    def send_heartbeats(self) -> None:
        """Report the status of all healthy kubelets, one after the other."""
        begun, sent = time.monotonic(), 0
        while not self.stop.wait(max(0.0, begun + sent * HEARTBEAT_S / self.size - time.monotonic())):
            if (number := sent % self.size) not in self.silent:
                self.report_kubelet(number, ready=True)
            sent += 1

    def report_kubelet(self, number: int, *, ready: bool) -> None:
        """Patch a Node's own conditions only, keeping those that the fleet set."""
        body = {"status": make_node_status(ready)}
        self.request("PATCH", f"/api/v1/nodes/n-{number}/status", body)

    def cordon(self, number: int, *, on: bool = True) -> None:
        self.request("PATCH", f"/api/v1/nodes/n-{number}", {"spec": {"unschedulable": on or None}})

    def is_drained(self, number: int) -> bool:
        return not self.slurm.is_unchanged(f"w-{number}", UNTOUCHED)

    def is_undrained(self, number: int) -> bool:
        return self.slurm.is_unchanged(f"w-{number}", LIFTED)


def make_node_status(ready: bool, *more: dict[str, str]) -> dict[str, object]:
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
def open_site(directory: Path, size: int, many: int = 0) -> Iterator[Site]:
    """Start a site; `many` of its nodes have a slurmd."""
    (directory / "slurm").mkdir()
    with api_server(programs.build(), directory) as api, world(directory / "slurm", "scale") as slurm:
        (slurm.mounts / "secrets" / "slurm").mkdir()
        key = slurm.mounts / "secrets" / "slurm" / "jwt_hs256.key"
        key.write_bytes(os.urandom(32))
        asleep = ("ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1")
        nodes = (*make_node_lines(size, many), *asleep)
        conf = re.sub(
            "MaxNodeCount=[0-9]+", f"MaxNodeCount={size + 1}", slurm_conf(*JWT_LINES, *nodes, accounting=False)
        )
        conf = share_settings(conf) if many else conf
        slurm.configure({"slurm.conf": conf})
        begun = time.monotonic()
        behind = start_slurmd(slurm, conf, directory, many) if many else None
        env = {"MINIVM_ACCOUNTING": "none", "MINIVM_SLURMRESTD": "0.0.0.0:6820"}
        controller = slurm.pod("controller", "slurm-controller", env=env).wait_ready(180)
        controller.container.reload()
        at = controller.container.attrs["NetworkSettings"]["Networks"][slurm.network.name]["IPAddress"]
        built = Site(api, f"{at}:6820", key, directory, size)
        built.create_objects()
        until(lambda: len(built.slurm.look(jobs=False).nodes) == size, "slurmctld knows them", within=120)
        if behind:
            idle = partial(controller.run, "sinfo", "--noheader", "--responding", "--states=idle", "--format=%D")
            until(lambda: int(idle() or 0) >= many, "each slurmd has registered", within=900, seen=behind.logs)
            print_row(
                f"{many} slurmd, until the last one has registered, from the first one's start",
                seconds_since(begun),
                "s",
            )
        beating = threading.Thread(target=built.send_heartbeats)
        beating.start()
        try:
            yield built
        finally:
            built.stop.set()
            beating.join()


# The slurmd daemons: many in one container.

HOST = "slurm-nodes"
FIRST_PORT = 20000
# Memory of one slurmd: a fixed part, and a part for each node in slurm.conf. REST_MB is for everything else, mostly
# slurmrestd.
OWN_MB, NODE_MB, REST_MB = 2.3, 0.00134, 4000
THREADS, REST_THREADS = 13, 4000
# Settings with which many slurmd share one container and its cgroup.
SHARED_SETTINGS = (
    "SlurmdSpoolDir=/run/nodes/%n/spool",
    "SlurmdPidFile=/run/nodes/%n/pid",
    "SlurmdLogFile=/run/nodes/%n/log",
    "SlurmdParameters=config_overrides",
    "DebugFlags=NO_CONF_HASH",
)
# Start the daemons one after the other; each puts itself into the background.
START_SCRIPT = """
set -eu
install -d -o munge -g munge -m 700 /run/munge-key /var/lib/munge
install -o munge -g munge -m 400 /mnt/minivm/secrets/munge/munge.key /run/munge-key/munge.key
install -d -o munge -g munge -m 755 /run/munge /var/log/munge
setpriv --reuid munge --regid munge --clear-groups munged --key-file /run/munge-key/munge.key --num-threads 4
printf 'CgroupPlugin=disabled\\n' > /run/cgroup.conf
cp /conf/slurm.conf /run/slurm.conf
number=0
while [ $number -lt "$MANY" ]; do
    mkdir -p /run/nodes/w-$number/spool
    slurmd -f /run/slurm.conf -N w-$number
    number=$((number + 1))
done
echo all are started
exec sleep infinity
"""


def count_fitting(size: int, memory_mb: float, threads: int) -> int:
    """Return how many slurmd fit, when slurm.conf names `size` nodes."""
    by_memory = (memory_mb - REST_MB) / (OWN_MB + size * NODE_MB)
    return max(0, min(int(by_memory), (threads - REST_THREADS) // THREADS, size))


def count_fitting_here(size: int) -> int:
    """Return how many slurmd fit on this machine now."""
    meminfo = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(words[1]) for words in meminfo if words[0] == "MemAvailable:") / 1024
    most = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
    return count_fitting(size, free, most)


def choose_slurmd(size: int, usual: int, name: str = "MINIVM_BENCH_SLURMD") -> int:
    """Return the requested number of slurmd, or the usual one as far as it fits."""
    requested, most = os.environ.get(name, ""), count_fitting_here(size)
    if not requested:
        return min(usual, most)
    if not (requested.isascii() and requested.isdigit() and len(requested) < 9) or int(requested) > most:
        raise SystemExit(
            f"error: {name}: found {requested!r}, expected a number up to {most}: no more fit on this machine"
        )
    return int(requested)


def make_node_lines(size: int, many: int) -> tuple[str, ...]:
    """Return slurm.conf's lines for nodes with a slurmd, and for those that are powered down."""
    each = "CPUs=8 RealMemory=1000"
    ports = f"{FIRST_PORT}-{FIRST_PORT + many - 1}"
    real = f"NodeName=w-[0-{many - 1}] NodeHostname={HOST} NodeAddr={HOST} Port=[{ports}] {each} State=UNKNOWN"
    asleep = f"NodeName=w-[{many}-{size - 1}] {each} State=CLOUD"
    return (*((real, *SHARED_SETTINGS) if many else ()), *((asleep,) if many < size else ()))


def share_settings(conf: str) -> str:
    """Drop the settings that CONF replaces; slurmd accepts no setting twice."""
    own_keys = {line.partition("=")[0] for line in SHARED_SETTINGS}
    kept = [line for line in conf.splitlines() if line in SHARED_SETTINGS or line.partition("=")[0] not in own_keys]
    return "\n".join(kept) + "\n"


def start_slurmd(slurm: World, conf: str, directory: Path, many: int) -> Pod:
    """Start the container; its log says when all slurmd run."""
    (directory / "conf").mkdir()
    (directory / "conf" / "slurm.conf").write_text(conf)
    container = slurm.client.containers.create(
        f"{IMAGES}/worker:latest",
        entrypoint=["/bin/bash", "-c", START_SCRIPT],
        name=f"{PREFIX}-{slurm.tag}-{HOST}",
        hostname=HOST,
        init=True,
        cap_drop=["ALL"],
        cap_add=["SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SYS_NICE"],
        environment={"MANY": str(many)},
        volumes={
            str(slurm.mounts): {"bind": "/mnt/minivm", "mode": "ro"},
            str(directory / "conf"): {"bind": "/conf", "mode": "ro"},
        },
        tmpfs={"/run": "mode=755"},
        pids_limit=-1,
        labels=LABELS,
    )
    pod = Pod(container)
    slurm.pods.append(pod)
    slurm.network.connect(container, aliases=[HOST])
    container.start()
    return pod


# The fleet under measurement.


class FleetProcess:
    """A `fleet run` process under measurement: its metrics and its cost."""

    def __init__(self, site: Site, name: str = "fleet") -> None:
        self.site, self.log = site, site.directory / f"{name}.log"
        self.metrics_at = f"127.0.0.1:{find_free_port()}"
        env = {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "HOME")},
            "KUBECONFIG": str(site.api.kubeconfig),
            "MINIVM_POD_NAMESPACE": "default",
            "MINIVM_FLEET_RELEASE": "slurm",
            "MINIVM_FLEET_SLURM": site.rest,
            "MINIVM_FLEET_KEY": str(site.key),
            "MINIVM_FLEET_POLICY": str(site.policy),
            "MINIVM_FLEET_HTTP": self.metrics_at,
            "MINIVM_FLEET_LEASE": LEASE_NAME,
            "MINIVM_POD_NAME": name,
        }
        with self.log.open("wb") as log:
            command = [sys.executable, "-u", "-m", "fleet", "run"]
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)

    def read_metric(self, name: str, label: str = "") -> int:
        """Return a metric; 0 while it is missing."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://{self.metrics_at}/metrics", timeout=30) as reply:
                text = reply.read().decode()
        except OSError:
            return 0
        key = f"minivm_fleet_{name}{label} "
        return next((int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(key)), 0)

    def count_changes(self, action: str) -> int:
        return self.read_metric("changes_total", f'{{action="{action}"}}')

    def read_processor_s(self) -> float:
        """Return the processor time in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read_memory_mb(self, key: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(f"{key}:"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


# The measurement.


def main() -> int:
    many = choose_slurmd(NODES, SLURMD)
    if many < SLURMD:
        print(f"running {many} of {SLURMD} slurmd: as many as requested, or as fit", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="minivm-bench-") as directory,
        open_site(Path(directory), NODES, many) as bench_site,
    ):
        fleet = FleetProcess(bench_site)
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.end)
            measure_start(bench_site, fleet)
            # It waits for the Lease.
            other = FleetProcess(bench_site, "other")
            stack.callback(other.end)
            measure(bench_site, fleet, other)
    return 0


def measure_start(made: Site, fleet: FleetProcess) -> None:
    begun = time.monotonic()
    until(partial(knows_both_sides, made, fleet), "both sides are known", within=300, seen=fleet.log.read_text)
    print_row(
        f"{made.size} Nodes, pods and nodes of Slurm, from its start to known and decided on", seconds_since(begun), "s"
    )
    print_row("memory, and at its most", fleet.read_memory_mb("VmRSS"), "MB", f"{fleet.read_memory_mb('VmHWM'):.0f}")


def measure(made: Site, fleet: FleetProcess, other: FleetProcess) -> None:
    until(lambda: other.read_metric("known", '{side="kubernetes"}'), "the other one follows", seen=other.log.read_text)
    wait_until_calm(fleet)
    used, waits = measure_idle(fleet, other)
    print_row("of a processor, nothing happens but heartbeats", used * 100, "%")
    print_row(
        "the same of the one that waits for the Lease", waits * 100, "%", f"{other.read_memory_mb('VmRSS'):.0f} MB"
    )
    measure_cordons(made)
    measure_mass_failure(made, fleet)
    print_row(
        "memory after all that, and at its most",
        fleet.read_memory_mb("VmRSS"),
        "MB",
        f"{fleet.read_memory_mb('VmHWM'):.0f}",
    )


def wait_until_calm(fleet: FleetProcess) -> None:
    """Wait until the fleet has done its initial work."""
    before = -1
    while before != (
        before := sum(fleet.count_changes(verb) for verb in ("showonpod", "showonnode", "drain", "undrain"))
    ):
        time.sleep(CALM_S)


def knows_both_sides(made: Site, fleet: FleetProcess) -> bool:
    return fleet.read_metric("workers") == made.size and fleet.read_metric("known", '{side="slurm"}') == 1


def measure_idle(*fleets: FleetProcess) -> list[float]:
    before, begun = [fleet.read_processor_s() for fleet in fleets], time.monotonic()
    time.sleep(IDLE_S)
    took = seconds_since(begun)
    return [(fleet.read_processor_s() - used) / took for fleet, used in zip(fleets, before, strict=True)]


def measure_cordons(made: Site) -> None:
    """Cordon machines one after the other, measuring each drain; then take all cordons back."""
    step = max(1, made.size // CORDONS)
    chosen, took = range(0, step * CORDONS, step), []
    for number in chosen:
        begun = time.monotonic()
        made.cordon(number)
        until(partial(made.is_drained, number), "it is drained")
        took.append(seconds_since(begun))
    took.sort()
    print_row(f"the load of this machine, of {os.cpu_count()} cores", os.getloadavg()[0], "")
    worst = f"p99 {took[int(len(took) * 0.99) - 1]:.2f}, worst {took[-1]:.2f}"
    print_row(f"a cordon seen in Slurm, median of {len(took)}", statistics.median(took), "s", worst)
    begun = time.monotonic()
    for number in chosen:
        made.cordon(number, on=False)
    for number in chosen:
        until(partial(made.is_undrained, number), "it is undrained")
    print_row(f"{len(took)} cordons lifted at once, the last one seen in Slurm", seconds_since(begun), "s")


def measure_mass_failure(made: Site, fleet: FleetProcess) -> None:
    """Silence a share of the machines within a minute, as a broken cable does; count the drains."""
    before, many = fleet.count_changes("drain"), int(made.size * SHARE)
    begun = time.monotonic()
    for count in range(many):
        made.silent.add(count)
        made.report_kubelet(count, ready=False)
        time.sleep(max(0.0, begun + (count + 1) * WITHIN_S / many - time.monotonic()))
    until(lambda: fleet.read_metric("stands", '{kind="pause"}'), "it pauses", within=200)
    time.sleep(max(0.0, begun + WITHIN_S + LATER_S - time.monotonic()))
    drains = fleet.count_changes("drain") - before
    print_row(f"{many} machines silent within {WITHIN_S:.0f} s: drained until {LATER_S:.0f} s after that", drains, "")
    for line in fleet.log.read_text().splitlines():
        if line.startswith("fleet: of "):
            print(f"  {line}")


def print_row(what: str, value: float, unit: str, more: str = "") -> None:
    print(f"{what:<92} {value:8.2f} {unit:<2} {more}".rstrip(), flush=True)


def seconds_since(begun: float) -> float:
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
