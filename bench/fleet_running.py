"""A `fleet run` process under measurement: its metrics and its cost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.fleet import Site

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
