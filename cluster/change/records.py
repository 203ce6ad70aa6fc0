"""Move the accounting records of a cluster on one machine when `up` changes accounting.mode.

The records are a file beside the cluster's state from the moment at which the old database is closed until the new one
has them all: a cut `up` finds it again. `minivm accounting` in the pods refuses what would lose records.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import ClusterError
from cluster.pods import Kubelet, RunningPod
from ground.errors import one_line
from ground.files import sync_directory

POD = {"pod": "slurm-accounting-0", "embedded": "slurm-controller-0", "external": "slurm-controller-0"}
FILES = "records-from-*.tar"
LOADING = ".records.loading"  # beside that file: its load began, and may have completed in the pod without `up`
# In the pod, on its disk; the directory and, by the shell's umask, the file are root's alone.
INSIDE = "/root/minivm-records.sql"
REMOVE = ("rm", "-f", INSIDE)
NEVER_ARRIVED = 3  # exit code of `minivm accounting move-out`
RECONFIGURE = ("scontrol", "reconfigure")
POLL = 0.2


class RecordsCarrier:
    """`find` returns the running pod of a mode; None without one."""

    def __init__(
        self, kubelet: Kubelet, state: Path, find: Callable[[str], RunningPod | None], log: Callable[[str], None]
    ) -> None:
        self.kubelet, self.state, self.find, self.log = kubelet, state, find, log

    def move_out(self, origin: str, target: str) -> None:
        """Close the database of `origin`, and keep its records beside the cluster's state."""
        cannot = f"move the records of accounting out of {POD[origin]}"
        given_up = f"accounting: no record has arrived in the {origin} database: the {target} one opens again"
        waiting = self._find_waiting()
        own = waiting is not None and waiting == self._file(target)
        if own and not self._loading.exists():
            self.log(given_up)
            return
        pod = self.find(origin)
        if pod is None or not pod.running:
            if not own:
                raise ClusterError(
                    cannot, "the pod does not run; nothing was changed", hint="make up, with the old values"
                )
            start = f"docker start {pod.container[:12]}" if pod else f"make up, with mode: {origin}, from: {target}"
            problem = "the pod does not run, and only it can tell whether it got the records; nothing was changed"
            raise ClusterError(cannot, problem, hint=f"let it start ({start}), then make up, with these values")
        partial = self.state / ".records.partial"
        try:
            command = f"umask 077; rm -f {INSIDE}; exec minivm accounting move-out > {INSIDE}"
            code, text = self.kubelet.exec(pod.container, ["sh", "-c", command])
            if code == NEVER_ARRIVED and own:
                self.log(given_up)
                return
            if code:
                raise ClusterError(cannot, one_line(text) or f"exit code {code}", hint="make status")
            stream, _ = self.kubelet.api.get_archive(pod.container, INSIDE)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                for part in stream:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        finally:
            self._remove_inside(pod)
        if waiting and own and _read_head(waiting)["token"] not in _read_head(partial)["history"]:
            # What an earlier move wrote there: the load of the newer records was refused before it changed anything.
            partial.unlink()
            self.log(given_up)
            return
        # A file that was loaded, and whose `up` was cut before it removed it.
        for old in self.state.glob(FILES):
            old.unlink()
        self._loading.unlink(missing_ok=True)
        partial.rename(self._file(origin))
        sync_directory(self.state)
        self.log(f"accounting: {one_line(text)}")

    def move_in(self, target: str, *, timeout: float) -> None:
        """Load the records that are under way, if there are any, into the database of `target`."""
        file = self._find_waiting()
        if file is None or target == "none":
            return
        pod = self._wait_until_started(target, timeout)
        try:
            if file == self._file(target):
                command = "exec minivm accounting reopen --yes"  # they were loaded nowhere: move_out() would have told
            else:
                command = f"exec minivm accounting move-in < {INSIDE}"
                self._loading.touch(mode=0o600)
                sync_directory(self.state)
                self.kubelet.exec(pod.container, REMOVE)
                with file.open("rb") as records:
                    self.kubelet.api.put_archive(pod.container, str(Path(INSIDE).parent), records)
            code, text = self.kubelet.exec(pod.container, ["sh", "-c", command])
        finally:
            self._remove_inside(pod)
        if code:
            raise ClusterError(f"load the records of accounting into {POD[target]}", one_line(text),
                               hint="the same `up` goes on; the database before has them, too")  # fmt: skip
        # Logins and workers learn where slurmdbd is now: they ask at a reconfigure alone.
        if (controller := self.find("embedded")) and self.kubelet.exec(controller.container, RECONFIGURE)[0]:
            self.log("accounting: slurmctld did not tell its clients; in its pod: scontrol reconfigure")
        file.unlink()
        self._loading.unlink(missing_ok=True)
        self.log(f"accounting: {one_line(text)}")

    def _wait_until_started(self, mode: str, timeout: float) -> RunningPod:
        """Wait until init answers in the pod; `minivm accounting` itself waits for the database."""
        deadline = time.monotonic() + timeout
        while True:
            pod = self.find(mode)
            if pod and pod.running and self.kubelet.exec(pod.container, ["minivm", "status"])[0] == 0:
                return pod
            if time.monotonic() > deadline:
                raise ClusterError("load the records of accounting", f"{POD[mode]} does not start", hint="make status")
            time.sleep(POLL)

    def _remove_inside(self, pod: RunningPod) -> None:
        """Remove the records in the pod; one that has gone has none."""
        with contextlib.suppress(OSError):
            self.kubelet.exec(pod.container, REMOVE)

    @property
    def _loading(self) -> Path:
        return self.state / LOADING

    def _find_waiting(self) -> Path | None:
        return next(iter(sorted(self.state.glob(FILES))), None)

    def _file(self, mode: str) -> Path:
        return self.state / FILES.replace("*", mode)


def _read_head(file: Path) -> dict[str, Any]:
    """Return the first line of records, which `minivm accounting move-out` wrote."""
    with tarfile.open(file) as archive:
        member = archive.next()
        records = archive.extractfile(member) if member else None
        head: dict[str, Any] = json.loads((records.readline() if records else b"").partition(b": ")[2])
        return head
