"""Requests to this pod by an annotation, which Kubernetes shows as a file: to restart its slurmd.

The fleet makes it if Slurm no longer knows a ready node; a person may, too. A user who may write a pod's annotations
may also delete the pod. A restart ends no job. A request that exists when the pod begins counts as done: slurmd is new.
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
# Bytes of a request, and seconds between two restarts.
MOST, REST_S = 64, 60.0


class AskedWatch:
    """Watch the file. A new request restarts slurmd once, at the earliest a minute after the previous restart."""

    def __init__(self, control: Path, directory: Path = DIRECTORY, now: Callable[[], float] = time.monotonic) -> None:
        self.control, self.file, self.now = control, directory / WORD, now
        self.again: float | None = None
        self.heeded = self._word()
        self.rests = 0.0  # no restart before this time

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
        """Read the request; "" if it cannot be read. Follows Kubernetes' own link; nobody in the pod can write here."""
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
