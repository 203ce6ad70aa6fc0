"""Move the accounting records of a cluster on one machine when `up` changes accounting.mode.

The records are a file beside the cluster's state from the moment at which the old database is closed until the new one
has them all: a cut `up` finds it again. `minivm accounting` in the pods refuses what would lose records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster.errors import ClusterError
from cluster.pods import Kubelet, RunningPod
from ground.errors import one_line

POD = {"pod": "slurm-accounting-0", "embedded": "slurm-controller-0", "external": "slurm-controller-0"}
FILES = "records-from-*.tar"
# In the pod; the shell's umask makes it root's alone.
INSIDE = "/tmp/minivm-records.sql"
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
        pod = self.find(origin)
        if pod is None or not pod.running:
            raise ClusterError(cannot, "the pod does not run; nothing was changed", hint="make up, with the old values")
        command = f"umask 077; exec minivm accounting move-out > {INSIDE}"
        code, text = self.kubelet.exec(pod.container, ["sh", "-c", command])
        if code == NEVER_ARRIVED and self._waiting() == self._file(target):
            self.log(f"accounting: no record has arrived in the {origin} database: the {target} one opens again")
            return
        if code:
            raise ClusterError(cannot, one_line(text) or f"exit code {code}", hint="make status")
        partial = self.state / ".records.partial"
        stream, _ = self.kubelet.api.get_archive(pod.container, INSIDE)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            for part in stream:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        # A file that was loaded, and whose `up` was cut before it removed it.
        for old in self.state.glob(FILES):
            old.unlink()
        partial.rename(self._file(origin))
        self.kubelet.exec(pod.container, ["rm", "-f", INSIDE])
        self.log(f"accounting: {one_line(text)}")

    def move_in(self, target: str, *, timeout: float) -> None:
        """Load the records that are under way, if there are any, into the database of `target`."""
        file = self._waiting()
        if file is None or target == "none":
            return
        pod = self._started(target, timeout)
        if file == self._file(target):
            command = "exec minivm accounting reopen --yes"  # they were loaded nowhere: move_out() would have told
        else:
            command = f"exec minivm accounting move-in < {INSIDE}"
            with file.open("rb") as records:
                self.kubelet.api.put_archive(pod.container, str(Path(INSIDE).parent), records)
        code, text = self.kubelet.exec(pod.container, ["sh", "-c", command])
        self.kubelet.exec(pod.container, ["rm", "-f", INSIDE])
        if code:
            raise ClusterError(f"load the records of accounting into {POD[target]}", one_line(text),
                               hint="the same `up` goes on; the database before has them, too")  # fmt: skip
        # Logins and workers learn where slurmdbd is now: they ask at a reconfigure alone.
        if (controller := self.find("embedded")) and self.kubelet.exec(controller.container, RECONFIGURE)[0]:
            self.log("accounting: slurmctld did not tell its clients; in its pod: scontrol reconfigure")
        file.unlink()
        self.log(f"accounting: {one_line(text)}")

    def _started(self, mode: str, timeout: float) -> RunningPod:
        """Wait until init answers in the pod; `minivm accounting` itself waits for the database."""
        deadline = time.monotonic() + timeout
        while True:
            pod = self.find(mode)
            if pod and pod.running and self.kubelet.exec(pod.container, ["minivm", "status"])[0] == 0:
                return pod
            if time.monotonic() > deadline:
                raise ClusterError("load the records of accounting", f"{POD[mode]} does not start", hint="make status")
            time.sleep(POLL)

    def _waiting(self) -> Path | None:
        return next(iter(sorted(self.state.glob(FILES))), None)

    def _file(self, mode: str) -> Path:
        return self.state / FILES.replace("*", mode)
