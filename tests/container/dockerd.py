"""A docker engine of the test's own, on a small disk that nobody else sees: what happens when it is full."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from images.host import engine_answers
from tests.waiting import PATIENCE, until


class SmallEngine:
    """dockerd with its data, its containerd, its socket and its disk apart from every other engine's."""

    def __init__(self, root: Path, size: str) -> None:
        root.mkdir()
        self.root, self.socket = root, root / "socket"
        data = root / "data"
        data.mkdir()
        command = ["dockerd", "--data-root", str(data), "--exec-root", str(root / "exec"), "--log-level", "warn"]
        command += ["--pidfile", str(root / "pid"), "--host", f"unix://{self.socket}"]
        command += ["--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"]
        # A network of its own, because dockerd deletes an existing docker0 when it is told to have none.
        mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
        with (root / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--net", "sh", "-c", mount, str(data), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self.answers, "the small engine answers", seen=(root / "log").read_text)

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.root / "log").read_text()
        return engine_answers(str(self.socket))

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    def stop(self) -> None:
        self.process.terminate()  # dockerd ends its own containerd
        self.process.wait(timeout=PATIENCE)
        shutil.rmtree(self.root / "exec", ignore_errors=True)
