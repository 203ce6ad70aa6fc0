"""The processes of `bench fleet`: real slurmd daemons in one container, and the fleet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.container.init_pods import IMAGES, LABELS, PREFIX, Pod, World

if TYPE_CHECKING:
    from bench.fleet import Site

HOST = "slurm-nodes"
FIRST_PORT = 20000
# Memory of one slurmd: a fixed part, and a part for each node in slurm.conf. REST_MB is for everything else, mostly
# slurmrestd.
OWN_MB, NODE_MB, REST_MB = 2.3, 0.00134, 4000
THREADS, REST_THREADS = 13, 4000
# Settings with which many slurmd share one container and its cgroup.
CONF = (
    "SlurmdSpoolDir=/run/nodes/%n/spool",
    "SlurmdPidFile=/run/nodes/%n/pid",
    "SlurmdLogFile=/run/nodes/%n/log",
    "SlurmdParameters=config_overrides",
    "DebugFlags=NO_CONF_HASH",
)
# Start the daemons one after the other; each puts itself into the background.
START = """
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


def fit(size: int, memory_mb: float, threads: int) -> int:
    """Return how many slurmd fit, when slurm.conf names `size` nodes."""
    by_memory = (memory_mb - REST_MB) / (OWN_MB + size * NODE_MB)
    return max(0, min(int(by_memory), (threads - REST_THREADS) // THREADS, size))


def room(size: int) -> int:
    """Return how many slurmd fit on this machine now."""
    meminfo = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(words[1]) for words in meminfo if words[0] == "MemAvailable:") / 1024
    most = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
    return fit(size, free, most)


def chosen(size: int, usual: int, name: str = "MINIVM_BENCH_SLURMD") -> int:
    """Return the requested number of slurmd, or the usual one as far as it fits."""
    requested, most = os.environ.get(name, ""), room(size)
    if not requested:
        return min(usual, most)
    if not (requested.isascii() and requested.isdigit() and len(requested) < 9) or int(requested) > most:
        raise SystemExit(
            f"error: {name}: found {requested!r}, expected a number up to {most}: no more fit on this machine"
        )
    return int(requested)


def lines(size: int, many: int) -> tuple[str, ...]:
    """Return slurm.conf's lines for nodes with a slurmd, and for those that are powered down."""
    each = "CPUs=8 RealMemory=1000"
    ports = f"{FIRST_PORT}-{FIRST_PORT + many - 1}"
    real = f"NodeName=w-[0-{many - 1}] NodeHostname={HOST} NodeAddr={HOST} Port=[{ports}] {each} State=UNKNOWN"
    asleep = f"NodeName=w-[{many}-{size - 1}] {each} State=CLOUD"
    return (*((real, *CONF) if many else ()), *((asleep,) if many < size else ()))


def suited(conf: str) -> str:
    """Drop the settings that CONF replaces; slurmd accepts no setting twice."""
    own_keys = {line.partition("=")[0] for line in CONF}
    kept = [line for line in conf.splitlines() if line in CONF or line.partition("=")[0] not in own_keys]
    return "\n".join(kept) + "\n"


def start(slurm: World, conf: str, directory: Path, many: int) -> Pod:
    """Start the container; its log says when all slurmd run."""
    (directory / "conf").mkdir()
    (directory / "conf" / "slurm.conf").write_text(conf)
    container = slurm.client.containers.create(
        f"{IMAGES}/worker:latest",
        entrypoint=["/bin/bash", "-c", START],
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


# A `fleet run` process under measurement: its metrics and its cost.
ROOT = Path(__file__).resolve().parents[1]
LEASE = "slurm-fleet"


class FleetProcess:
    """A `fleet run` process."""

    def __init__(self, site: Site, name: str = "fleet") -> None:
        self.site, self.log = site, site.directory / f"{name}.log"
        self.metrics_at = f"127.0.0.1:{free_port()}"
        env = {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "HOME")},
            "KUBECONFIG": str(site.api.kubeconfig),
            "MINIVM_POD_NAMESPACE": "default",
            "MINIVM_FLEET_RELEASE": "slurm",
            "MINIVM_FLEET_SLURM": site.rest,
            "MINIVM_FLEET_KEY": str(site.key),
            "MINIVM_FLEET_POLICY": str(site.policy),
            "MINIVM_FLEET_HTTP": self.metrics_at,
            "MINIVM_FLEET_LEASE": LEASE,
            "MINIVM_POD_NAME": name,
        }
        with self.log.open("wb") as log:
            command = [sys.executable, "-u", "-m", "fleet", "run"]
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)

    def metric(self, name: str, label: str = "") -> int:
        """Return a metric; 0 while it is missing."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://{self.metrics_at}/metrics", timeout=30) as reply:
                text = reply.read().decode()
        except OSError:
            return 0
        key = f"minivm_fleet_{name}{label} "
        return next((int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(key)), 0)

    def done(self, action: str) -> int:
        return self.metric("changes_total", f'{{action="{action}"}}')

    def processor(self) -> float:
        """Return the processor time in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, key: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(f"{key}:"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
