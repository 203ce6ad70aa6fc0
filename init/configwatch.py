"""Watches the mounted configuration and applies what has changed, or says why not. A service of every role.

slurm.conf (controller): a candidate is read beside the live file by one of Slurm's own clients, then installed, then
`scontrol reconfigure`; what slurmctld refuses is taken back, and the running one stays as it is. Service drop-ins: the
merged plan goes to PID 1, which touches only what differs. Nothing polls: the kernel says when to look.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from init.client import SOCKET, Client
from init.dirwatch import Watcher
from init.errors import InitError
from init.helper import condition, say
from init.places import PLAN
from init.prepare.pod import Pod
from init.sd_notify import notify
from init.slurm_files import SlurmFiles
from init.slurmctld import PROGRAM, Answer, Outcome, Slurmctld

DROPINS = [
    Path(root) / name for root in ("/etc/minivm", "/mnt/minivm/config") for name in ("services.d", "supervisor.d")
]
# A ConfigMap's swap is one rename; a copy by hand is several writes.
QUIET = 0.2
KILLED = "; slurmctld hung and was restarted"


class DropInError(InitError):
    """Changed drop-ins that are not applied; the running services stay."""


class SlurmWatch:
    """The mounted slurm.conf. What was refused is looked at again only when it changes again."""

    condition = "slurm.conf"

    def __init__(self, control: Path, files: SlurmFiles, daemon: Slurmctld) -> None:
        self.control = control
        self.files = files
        self.daemon = daemon
        self.refused: dict[str, bytes] = {}

    def look(self) -> None:
        files = self.files.changed()
        if files is None:
            if self.refused:
                self.refused = {}
                self._tell("")  # the mounted files are the running ones again
            return
        if files == self.refused:
            return
        began = time.monotonic()
        answer = self.apply(files)
        self.refused = {} if answer.outcome is Outcome.LIVE else files
        if answer.outcome is Outcome.LIVE:
            self._tell("")
            took = time.monotonic() - began
            say(f"new configuration ({', '.join(sorted(files))}): {answer.text} after {took:.2f} s")
        else:
            self._tell(f"refused, the last one stays: {answer.text}")

    def apply(self, files: dict[str, bytes]) -> Answer:
        """Tried, and once more where slurmctld has said nothing: then it has not judged the files."""
        answer, killed = self._try(files)
        if answer.outcome is Outcome.SILENT:
            say(f"{answer.text}{KILLED if killed else ''}; the new configuration is tried once more")
            answer, killed = self._try(files)
        return answer._replace(text=f"{answer.text}{KILLED}") if killed else answer

    def _try(self, files: dict[str, bytes]) -> tuple[Answer, bool]:
        """Read by a client, installed, read by slurmctld. Unless it is live, all is put back, and slurmctld answers."""
        try:
            against = self.daemon.objects_to(self.files.candidate(files))
            if against:
                return Answer(Outcome.REFUSED, against), False
            before = self.files.install(files)
            answer = self.daemon.read_anew()
            if answer.outcome is Outcome.LIVE:
                return answer, False
            self.files.put_back(before, files)
            return answer, self.daemon.revive()
        except InitError as error:
            return Answer(Outcome.REFUSED, error.why), False

    def _tell(self, text: str) -> None:
        if text:
            say(f"{self.condition}: {text}")
        condition(self.control, self.condition, text)


class DropInWatch:
    """The services' drop-ins."""

    condition = "drop-ins"

    def __init__(self, control: Path, directories: Iterable[Path]) -> None:
        self.control = control
        self.directories = list(directories)
        self.seen = fingerprint(self.directories)

    def look(self) -> None:
        now = fingerprint(self.directories)
        if now == self.seen:
            return
        self.seen = now
        try:
            change = apply_dropins(self.control)
        except InitError as error:
            say(f"{self.condition}: refused: {error.why}")
            condition(self.control, self.condition, f"refused: {error.why}")
            return
        condition(self.control, self.condition, "")
        parts = [f"{what} {' '.join(change[what])}" for what in ("added", "removed", "changed") if change.get(what)]
        say(f"drop-ins applied: {'; '.join(parts) or 'nothing differs'}")


def fingerprint(directories: Iterable[Path]) -> tuple[tuple[str, bytes], ...]:
    """Name and content of every file, such as they can be read: what differs is looked at."""
    found = []
    for directory in directories:
        for path in sorted(directory.glob("[!.]*")) if directory.is_dir() else []:
            with contextlib.suppress(OSError):
                if path.is_file():
                    found.append((str(path), path.read_bytes()))
    return tuple(found)


def apply_dropins(control: Path = SOCKET, plan: str = PLAN) -> dict[str, Any]:
    """Merge the drop-ins over the image's plan in a child (yaml is heavy, and wanted rarely) and hand it to PID 1."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "init.dropins", "merge", plan],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DropInError("apply the drop-ins", done.stderr.strip() or f"exit {done.returncode}")
    with Client(control, within=60.0) as client:
        return client.request("apply", plan=json.loads(done.stdout))


def main(control: Path = SOCKET) -> int:
    watcher = Watcher()
    watches: list[SlurmWatch | DropInWatch] = []
    directories = list(DROPINS)
    if PROGRAM.exists():
        files = SlurmFiles(Pod(os.environ))
        directories.append(files.mounted)
        watches.append(SlurmWatch(control, files, Slurmctld(control)))
    for directory in directories:
        watcher.watch(directory)
    watches.append(DropInWatch(control, DROPINS))
    notify("READY=1")
    while True:
        for watch in watches:
            watch.look()
        watcher.wait(None)
        watcher.settle(QUIET)
        for directory in directories:
            watcher.watch(directory)  # one that has appeared, or was replaced


if __name__ == "__main__":
    raise SystemExit(main())
