"""Measure submissions while the active controller goes: two controllers of minivm beside Slurm's own backup controller.

`python -m bench failover`, with MINIVM_BENCH_TURNS turns of each fault, 3 by default. Both run real slurmctlds of the
same image on one machine. Four clients submit held jobs all the time, each its next one at once.

- without a submission: the longest time between two accepted ones, until the former controllers are back in place.
- lost: submissions that sbatch confirmed, of which no job is left and none was brought back.
- given again: numbers that sbatch printed a second time.
"""

from __future__ import annotations

import ipaddress
import os
import re
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster import report
from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine
from tests.waiting import until

TURNS = int(os.environ.get("MINIVM_BENCH_TURNS", "3"))
NAME = "bench-failover"
WORK = "/tmp/failover"  # in the clients' container
READY_S, RESUMED_S = 240.0, 150.0
STOPPED_S = 30.0
# slurmctld saves at most every 5 s, and looks each second.
SAVED_S = 8.0
SUBMIT = r"""
import os, subprocess, threading, time
lock, out = threading.Lock(), open("taken", "w", buffering=1)
def submit():
    while not os.path.exists("enough"):
        command = ["timeout", "30", "sbatch", "--parsable", "-H", "-o", "/dev/null", "--wrap", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        with lock:
            if done.returncode == 0: out.write(f"{done.stdout.strip()} {time.time():.2f}\n")
        time.sleep(0.2)
threads = [threading.Thread(target=submit) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@dataclass(frozen=True, slots=True)
class Outage:
    gap: float
    lost: int
    again: int


class Controllers(ABC):
    """A cluster with two controllers, and a container in which a user submits."""

    title: str
    client: str
    user: str

    def __init__(self, api: Any) -> None:
        self.api = api
        self.stopped = ""

    def run(self, container: str, *command: str) -> tuple[int, str]:
        started = self.api.exec_create(container, ["timeout", "40", *command])["Id"]
        text = self.api.exec_start(started).decode(errors="replace")
        return int(self.api.exec_inspect(started)["ExitCode"] or 0), text

    def as_user(self, script: str) -> str:
        code, text = self.run(
            self.client, "runuser", "-u", self.user, "--", "sh", "-c", f"mkdir -p {WORK}; cd {WORK}; {script}"
        )
        if code:
            raise RuntimeError(f"{script}: exit code {code}: {text[-500:]}")
        return text

    @abstractmethod
    def active(self) -> str:
        """Return the container of the active controller, while the other one stands by; "" meanwhile."""

    @abstractmethod
    def replace(self, active: str) -> None:
        """End the active controller in order, as an upgrade does, and start it again."""

    @abstractmethod
    def power_on(self, dead: str) -> None:
        """Start a controller again on a machine that died."""

    def kill(self, active: str) -> None:
        self.run(active, "pkill", "-KILL", "-x", "slurmctld")

    def die(self, active: str) -> None:
        """End it without a word to any peer: no packet leaves its network or is answered there."""
        (network,) = self.api.inspect_container(active)["NetworkSettings"]["Networks"]
        self.api.disconnect_container_from_network(active, network, force=True)
        self.api.pause(active)
        self.stopped = active

    def stop(self, active: str) -> None:
        self.api.pause(active)
        try:
            time.sleep(STOPPED_S)
        finally:
            self.api.unpause(active)

    def heal(self) -> None:
        if self.stopped:
            self.power_on(self.stopped)
        self.stopped = ""


class Minivm(Controllers):
    title, user = "minivm", "alice"

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster.kubelet.api)
        self.cluster = cluster
        self.client = cluster.kubelet.list_pods()["slurm-login-0"].container

    def pod_of(self, container: str) -> str:
        return next(name for name, pod in self.cluster.kubelet.list_pods().items() if pod.container == container)

    def active(self) -> str:
        pods = [pod for pod in self.cluster.kubelet.list_pods().values() if pod.role == "controller"]
        turns = {pod.container: report.read_turn(pod).partition(",")[0].partition(":")[0] for pod in pods}
        return next((name for name, turn in turns.items() if sorted(turns.values()) == ["active", "standby"]
                     and turn == "active"), "")  # fmt: skip

    def replace(self, active: str) -> None:
        self.cluster.delete(self.pod_of(active))

    def power_on(self, dead: str) -> None:
        self.cluster.delete(self.pod_of(dead), force=True)


BACKUP_CONF = """
ClusterName=backup
SlurmctldHost=c0
SlurmctldHost=c1
SlurmctldTimeout=30
SlurmUser=slurm
AuthType=auth/slurm
CredType=cred/slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MaxJobCount=50000
ReturnToService=2
NodeName=w CPUs=1 RealMemory=500
PartitionName=all Nodes=w Default=YES
"""
KEY = "umask 077; head -c 1024 /dev/urandom > /etc/slurm/slurm.key; chown slurm: /etc/slurm/slurm.key"


class SlurmBackup(Controllers):
    """Two slurmctlds with one state volume, as SlurmctldHost twice configures it; a restart policy is the kubelet."""

    title, user = "Slurm's backup controller", "root"

    def __init__(self, client: Any, stack: ExitStack) -> None:
        super().__init__(client.api)
        forget(client)
        draft = self.api.create_network(NAME, driver="bridge")["Id"]
        (pool,) = self.api.inspect_network(draft)["IPAM"]["Config"]
        self.api.remove_network(draft)
        # Only a network of a given subnet gives containers addresses that were chosen before.
        network = self.api.create_network(NAME, driver="bridge", ipam={"Config": [{"Subnet": pool["Subnet"]}]})["Id"]
        stack.callback(self.api.remove_network, network)
        hosts = ipaddress.ip_network(pool["Subnet"])
        self.network = NAME
        self.addresses = {name: str(hosts[host]) for host, name in enumerate(("c0", "c1", "w"), 10)}
        self.volumes = {}
        for name, place in (("conf", "/etc/slurm"), ("state", "/var/spool/slurmctld")):
            volume = client.volumes.create(f"{NAME}-{name}")
            stack.callback(volume.remove, force=True)
            self.volumes[volume.name] = {"bind": place, "mode": "rw"}
        self.stack, self.docker = stack, client
        self.client = self.start("w", "worker", ["sleep", "infinity"])
        quoted = BACKUP_CONF.replace("'", "")
        for script in (f"printf '%s' '{quoted}' > /etc/slurm/slurm.conf", KEY, "chown slurm: /var/spool/slurmctld"):
            self.as_user(script)
        self.first, self.second = (self.start(name, "controller", ["slurmctld", "-D"]) for name in ("c0", "c1"))
        self.as_user("setsid -f slurmd < /dev/null > /dev/null 2>&1")

    def start(self, name: str, role: str, entrypoint: list[str]) -> str:
        made = self.docker.containers.create(
            f"{Options().repository}/{role}", name=f"{NAME}-{name}", hostname=name, entrypoint=entrypoint,
            volumes=self.volumes, extra_hosts=self.addresses, restart_policy={"Name": "always"}, init=True,
        )  # fmt: skip
        self.stack.callback(made.remove, force=True)
        self.api.disconnect_container_from_network(made.id, "bridge")
        self.connect(made.id, name)
        made.start()
        return str(made.id)

    def connect(self, container: str, name: str) -> None:
        self.api.connect_container_to_network(container, self.network, ipv4_address=self.addresses[name])

    def active(self) -> str:
        """Return the first one: it takes control again when it is back."""
        code, text = self.run(self.client, "scontrol", "ping")
        return self.first if code == 0 and text.count(" is UP") == 2 else ""

    def replace(self, active: str) -> None:
        self.api.stop(active, timeout=30)
        self.api.start(active)

    def power_on(self, dead: str) -> None:
        self.api.kill(dead)
        self.connect(dead, "c0")
        self.api.start(dead)


FAULTS: tuple[tuple[str, Callable[[Controllers, str], None]], ...] = (
    ("slurmctld is killed", lambda system, active: system.kill(active)),
    ("its pod is replaced", lambda system, active: system.replace(active)),
    ("its machine dies", lambda system, active: system.die(active)),
    (f"it stops for {STOPPED_S:g} s", lambda system, active: system.stop(active)),
)


def main() -> int:
    client = DockerEngine().client
    print("| the active controller: s without a submission, median (worst); jobs lost; numbers given again | | | |")
    for made in (minivm, slurm_backup):
        with made(client) as system:
            until(system.active, "two controllers", within=READY_S)
            for fault, act in FAULTS:
                turns = [turn_of(system, act) for _ in range(TURNS)]
                gaps = [turn.gap for turn in turns]
                lost, again = sum(turn.lost for turn in turns), sum(turn.again for turn in turns)
                gap = f"{statistics.median(gaps):.1f} ({max(gaps):.1f})"
                print(f"| {system.title} | {fault} | {gap} | {lost} | {again} |", flush=True)
    print(f"{TURNS} turns each; load {os.getloadavg()[0]:.1f}")
    return 0


@contextmanager
def minivm(client: Any) -> Iterator[Controllers]:
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as root:
        values = {"accounting": {"mode": "none"}}
        options = Options(name=NAME, workers=1, controllers=2, port=free_port(22400), overrides=values)
        cluster = LocalCluster(client, options, root=Path(root))
        cluster.down()
        try:
            cluster.up(timeout=READY_S)
            yield Minivm(cluster)
        finally:
            cluster.down()


@contextmanager
def slurm_backup(client: Any) -> Iterator[Controllers]:
    with ExitStack() as stack:
        yield SlurmBackup(client, stack)


def forget(client: Any) -> None:
    """Remove what a killed run left."""
    for container in client.containers.list(all=True, filters={"name": f"^/{NAME}-(c0|c1|w)$"}):
        container.remove(force=True)
    for network in client.networks.list(names=[f"^{NAME}$"]):
        network.remove()


def turn_of(system: Controllers, act: Callable[[Controllers, str], None]) -> Outage:
    system.as_user(f"rm -f enough taken; touch taken; cat > submit.py <<'END'\n{SUBMIT}\nEND\n"
                   "setsid -f python3 submit.py < /dev/null > /dev/null 2>&1")  # fmt: skip
    until(lambda: len(taken(system)) > 20, "jobs are taken", within=READY_S)
    time.sleep(SAVED_S)
    active, gone = until(system.active, "one controller acts", within=READY_S), time.time()
    act(system, active)
    begun = time.monotonic()
    while latest(system) < gone + 12 and time.monotonic() - begun < RESUMED_S:
        time.sleep(0.5)
    system.heal()
    until(system.active, "both are as before", within=READY_S)
    settled = time.time()
    until(lambda: latest(system) > settled, "jobs are taken", within=READY_S)
    system.as_user("touch enough")
    submitting = ("pgrep", "-f", "[s]ubmit.py")
    until(lambda: system.run(system.client, *submitting)[0] == 1, "no submission is on its way", within=READY_S)
    time.sleep(SAVED_S)
    jobs = taken(system)
    times = [gone, *sorted(at for _, at in jobs if at > gone)]
    numbers = [job for job, _ in jobs]
    there = until(lambda: present(system), "squeue answers", within=READY_S)
    lost = len(numbers) - len({*numbers} & there)  # of two jobs with one number, one is lost
    return Outage(max(later - earlier for earlier, later in pairwise(times)), lost, len(numbers) - len({*numbers}))


def taken(system: Controllers) -> list[tuple[str, float]]:
    """Return the number and the time of each submission that was accepted; the last line may be half written."""
    rows = [line.split() for line in system.as_user("cat taken").splitlines()]
    return [(row[0], float(row[1])) for row in rows if len(row) == 2]


def latest(system: Controllers) -> float:
    return max((at for _, at in taken(system)), default=0.0)


def present(system: Controllers) -> set[str]:
    """Return the numbers of all jobs, and the first numbers of those that were submitted again."""
    code, text = system.run(system.client, "squeue", "-h", "-a", "-t", "all", "-O", "JobID:|,ADMIN_COMMENT:|")
    if code:
        return set()
    again = set(re.findall(r"minivm: job (\d+) again", text))
    return again | {line.partition("|")[0].strip() for line in text.splitlines()}


if __name__ == "__main__":
    main()
