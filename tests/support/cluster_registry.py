"""A registry that a cluster's workers reach."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cluster.local import LocalCluster
from tests.cluster.conftest import IMAGES
from tests.container.conftest import docker
from tests.container.registryd import Registryd, root_of
from tests.waiting import until

WORKER = "slurm-worker-0"
PORT = 5000
DEBIAN = f"127.0.0.1:{PORT}/site/debian:13"
# The registry is on this one's loopback.
HERE = f"-w {WORKER}"


class registry_of:  # a context manager, called as one
    """A registry on the worker's own loopback: filled from here, then served in the pod's network."""

    def __init__(self, cluster: LocalCluster, root: Path) -> None:
        self.cluster, self.here = cluster, Registryd(root, auth={})

    def __enter__(self) -> None:
        self.here.start()
        self.fill()
        self.here.kill()
        config = json.loads((self.here.root / "config.yml").read_text())
        config["http"]["addr"] = f"127.0.0.1:{PORT}"
        (self.here.root / "config.yml").write_text(json.dumps(config))
        pod = self.cluster.kubelet.list_pods()[WORKER]
        pid = docker("inspect", "--format", "{{.State.Pid}}", pod.container)
        line = ["nsenter", f"--net=/proc/{pid}/ns/net", "docker-registry", "serve", str(self.here.root / "config.yml")]
        with (self.here.root / "log").open("ab") as log:
            self.here.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def listens() -> bool:
            return self.cluster.exec(WORKER, ["curl", "-sf", f"http://127.0.0.1:{PORT}/v2/"])[0] == 0

        until(listens, "the registry answers in the pod", seen=(self.here.root / "log").read_text)

    def fill(self) -> None:
        self.here.push(root_of(f"{IMAGES}/worker-containers:latest"), DEBIAN.partition("/")[2])

    def __exit__(self, *_: object) -> None:
        self.here.kill()
