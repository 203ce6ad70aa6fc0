"""A shared home that can hang for real: a FUSE file system whose server stops, as a file server on the network does.

The pods see one mount of it, as they would see one NFS export. While its server is stopped every question to it sleeps
in the kernel; when it goes on, they are answered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cluster.local import LocalCluster
from cluster.pods import LABEL
from tests.waiting import until

# The chart's mount path on logins and workers.
HOME = "/home"


class SharedHome:
    def __init__(self, root: Path) -> None:
        self.files, self.mount = root / "files", root / "mount"
        for directory in (self.files, self.mount):
            directory.mkdir(parents=True)
        # Its server dies with the tests, however these end.
        server = ["bindfs", "-f", "-o", "allow_other", str(self.files), str(self.mount)]
        self.server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *server])
        until(self.mount.is_mount, f"{self.mount} is mounted")

    def become_home(self, cluster: LocalCluster) -> None:
        """Stand where the chart's claim is looked for: a volume of the claim's name, made before any pod."""
        pod = cluster.manifests().pod("slurm-login-0")
        (mount,) = [mount for mount in pod.mounts if mount.path == HOME]
        cluster.kubelet.api.create_volume(
            cluster.kubelet.docker_mount(pod, mount)["Source"],
            driver_opts={"type": "none", "o": "bind", "device": str(self.mount)},
            labels={LABEL: cluster.options.name},
        )

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop the server, which takes its mount along."""
        self.server.terminate()
        self.server.wait(timeout=10)
