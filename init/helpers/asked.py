"""What somebody outside asks of this pod by an annotation, which Kubernetes shows as a file: to restart its slurmd.

The fleet asks where Slurm does not know a ready node any more; a person may, too. Whoever may write a pod's annotations
may delete the pod. A restart ends no job. The word that is there when the pod begins has been heeded: slurmd is new.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ground.errors import one_line
from init.errors import InitError
from init.pod.client import Client
from init.pod.helper import log, service

DIRECTORY = Path("/mnt/minivm/asked")
WORD = "restart-slurmd"
SLURMDS = ("slurmd", "slurmd-static")
# Of a word, and between two restarts.
MOST, REST_S = 64, 60.0


class AskedWatch:
    """The file's word. A new one restarts slurmd once, and not sooner than a minute after the last one did."""

    def __init__(self, control: Path, directory: Path = DIRECTORY, now: Callable[[], float] = time.monotonic) -> None:
        self.control, self.file, self.now = control, directory / WORD, now
        self.again: float | None = None
        self.heeded = self._word()
        self.rests = 0.0  # until then

    def look(self) -> None:
        self.again = None
        word = self._word()
        if not word or word == self.heeded:
            return
        if (left := self.rests - self.now()) > 0:
            self.again = left
            return
        self.heeded, self.rests = word, self.now() + REST_S
        try:
            log(f"asked to restart slurmd ({one_line(word)}): {self._restart()}")
        except (InitError, EOFError) as error:
            log(f"asked to restart slurmd ({one_line(word)}): {error}")

    def _restart(self) -> str:
        with Client(self.control) as client:
            name = next((name for name in SLURMDS if service(client, name) is not None), "")
            if not name:
                return "there is none"
            client.request("restart", service=name, wait=False)
            return f"{name} restarts"

    def _word(self) -> str:
        """Nothing where it cannot be read. Kubernetes' own link is followed; nobody in the pod can write here."""
        try:
            fd = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(fd, MOST).decode(errors="replace").strip()
        except OSError:
            return ""
        finally:
            os.close(fd)
