"""Watches the mounted configuration and applies what has changed, or says why not. A service of every role.

slurm.conf (controller): a candidate is read beside the live file by one of Slurm's own clients, weighed against the
jobs that it would end, then installed, then `scontrol reconfigure`; what slurmctld refuses is taken back, and the
running one stays as it is. What it runs with is kept for the next pod. Service drop-ins: the
merged plan goes to PID 1, which touches only what differs. What is asked of a worker: `init.helpers.asked`. Nothing
polls: the kernel says when to look.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ground.commands import ran
from ground.sockets import notify
from init.errors import InitError
from init.helpers.asked import DIRECTORY, AskedWatch
from init.places import PLAN
from init.pod.client import SOCKET, Client
from init.pod.dirwatch import Watcher
from init.pod.helper import condition, log
from init.pod.pod import Pod, write
from init.slurm.daemon import PROGRAM, Answer, Outcome, Slurmctld
from init.slurm.files import SlurmFiles
from init.slurm.judge import LIVE, REFUSED, SAID, Said, impossible, load_said, save_said, weigh
from init.slurm.kept import Kept, digest

DROPINS = [
    Path(root) / name for root in ("/etc/minivm", "/mnt/minivm/config") for name in ("services.d", "supervisor.d")
]
SEEN = Path("/run/minivm/drop-ins-seen")
ASK_AGAIN = 5.0  # seconds: for a slurmctld that does not answer yet
KEEP_AGAIN = 60.0  # for a volume that is full
# A ConfigMap's swap is one rename; a copy by hand is several writes.
QUIET = 0.2
KILLED = "; slurmctld hung and was restarted"


class DropInError(InitError):
    """Changed drop-ins that are not applied; the running services stay."""


class SlurmWatch:
    """The mounted slurm.conf. What was refused is looked at again only when it changes, or when somebody accepts it."""

    condition = "slurm.conf"

    def __init__(self, control: Path, files: SlurmFiles, daemon: Slurmctld, kept: Kept, said: Path = SAID) -> None:
        self.control = control
        self.files = files
        self.daemon = daemon
        self.kept = kept
        self.said = said
        self.refused = ""  # the hash of those files, and of what was accepted then
        self.again: float | None = None  # seconds, where a look has not come to an end
        self.unkept = False

    def look(self) -> None:
        self.again = None
        try:
            self.files.put_back()  # what a try left that was cut, or that found the disk full
        except InitError as error:
            self.again = ASK_AGAIN
            log(str(error))
            return
        accepted = self.kept.accepted()  # before the files: a word that is read is for these, or for some before them
        files = self.files.wanted()
        if files is None:
            return
        if self.files.runs_with(files):
            self._confirm(files, accepted)
            return
        named = digest(files)
        if self.refused == f"{named} {accepted}":
            return
        began = time.monotonic()
        answer = self.apply(files, accepted=accepted.split(" ")[0] == named)
        if answer.outcome is Outcome.LIVE:
            self._confirm(files, accepted)
            took = time.monotonic() - began
            log(f"new configuration ({', '.join(sorted(files))}): {answer.text} after {took:.2f} s")
        elif answer.outcome is Outcome.UNKNOWN:
            self.again = ASK_AGAIN
            self._tell(Said(named, REFUSED, f"refused, the last one stays: {answer.text}"))
        else:
            self.refused = f"{named} {accepted}"
            self._tell(Said(named, REFUSED, f"refused, the last one stays: {answer.text}"))

    def _confirm(self, files: dict[str, bytes], accepted: str) -> None:
        """They are installed. Once slurmctld answers with them they are what the next pod starts from, and a word for
        them, or for some before them, is spent: the same files, mounted again later, cost other jobs."""
        self.refused = ""
        if self.kept.good() != files:
            if not self.daemon.answers():
                self.again = ASK_AGAIN
                why = self.daemon.does_not_start()
                if why:  # a client names the key, and slurmctld's last word does not
                    why = self.daemon.objects_to(self.files.candidate(files)) or why
                    self._tell(Said(digest(files), REFUSED, f"slurmctld does not start with it: {why}"))
                return
            try:
                self.kept.keep(files)
            except InitError as error:  # a volume that is full: the cluster runs, and that is what counts
                if not self.unkept:
                    log(f"{error}; the next pod starts from what is mounted then")
                self.unkept, self.again = True, KEEP_AGAIN
                self.kept.drop()
                self._tell(Said(digest(files), LIVE))
                return
        self.unkept = False
        self.kept.spend(accepted)
        self._tell(Said(digest(files), LIVE))

    def apply(self, files: dict[str, bytes], *, accepted: bool = False) -> Answer:
        """Tried, and once more where slurmctld has said nothing: then it has not judged the files."""
        answer, killed = self._try(files, accepted=accepted)
        if answer.outcome is Outcome.SILENT:
            log(f"{answer.text}{KILLED if killed else ''}; the new configuration is tried once more")
            answer, killed = self._try(files, accepted=accepted)
        return answer._replace(text=f"{answer.text}{KILLED}") if killed else answer

    def _try(self, files: dict[str, bytes], *, accepted: bool) -> tuple[Answer, bool]:
        """Read by a client, weighed, installed, read by slurmctld. Unless it is live, all is put back, and slurmctld
        answers."""
        try:
            against = self.daemon.objects_to(self.files.candidate(files)) or impossible(self.files, files)
            if against:
                return Answer(Outcome.REFUSED, against), False
            if not accepted:
                found = weigh(self.files, self.daemon, files)
                if found.losses:
                    unknown = any(loss.jobs is None for loss in found.losses)
                    way = f"`minivm config accept {digest(files)}` takes it all the same"
                    text = f"it would end jobs: {found.cost}; {way}"
                    return Answer(Outcome.UNKNOWN if unknown else Outcome.REFUSED, text), False
            answer = self._reload(files)
            if answer.outcome is Outcome.LIVE:
                self.files.taken()
                return answer, False
            self.files.put_back()
            return answer, self.daemon.revive()
        except InitError as error:
            return Answer(Outcome.REFUSED, error.why), False

    def _reload(self, files: dict[str, bytes]) -> Answer:
        try:
            self.files.install(files)
            return self.daemon.reload()
        except InitError as error:
            return Answer(Outcome.REFUSED, error.why)

    def _tell(self, said: Said) -> None:
        if load_said(self.said) == said:
            return
        if said.why:
            log(f"{self.condition}: {said.why}")
        condition(self.control, self.condition, said.why)
        save_said(said, self.said)


class DropInWatch:
    """The services' drop-ins. What was seen is kept: a change while nobody watched is one to whoever watches next."""

    condition = "drop-ins"

    def __init__(self, control: Path, directories: Iterable[Path], kept: Path = SEEN) -> None:
        self.control = control
        self.again: float | None = None
        self.directories = list(directories)
        self.kept = kept
        try:
            self.seen = kept.read_text()
        except (OSError, ValueError):
            self._remember(fingerprint(self.directories))

    def _remember(self, now: str) -> None:
        self.seen = now
        with contextlib.suppress(InitError, OSError):  # a full disk: it counts as long as this process lives
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            write(self.kept, now.encode(), mode=0o600)

    def look(self) -> None:
        self.again = None
        now = fingerprint(self.directories)
        if now == self.seen:
            return
        try:
            change = apply_dropins(self.control)
        except OSError as error:  # no room for a process: nothing is said of the files yet
            log(f"{self.condition}: not read yet: {error.strerror}")
            self.again = ASK_AGAIN
            return
        except InitError as error:
            self._remember(now)
            log(f"{self.condition}: refused: {error.why}")
            condition(self.control, self.condition, f"refused: {error.why}")
            return
        self._remember(now)
        condition(self.control, self.condition, "")
        parts = [f"{what} {' '.join(change[what])}" for what in ("added", "removed", "changed") if change.get(what)]
        log(f"drop-ins applied: {'; '.join(parts) or 'nothing differs'}")


def fingerprint(directories: Iterable[Path]) -> str:
    """Of name and content of every file, such as they can be read: what differs is looked at."""
    found = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.glob("[!.]*")) if directory.is_dir() else []:
            with contextlib.suppress(OSError):
                if path.is_file():
                    data = path.read_bytes()
                    found.update(f"{len(str(path))} {len(data)} {path}".encode(errors="surrogateescape") + data)
    return found.hexdigest()


def apply_dropins(control: Path) -> dict[str, Any]:
    """Merge the drop-ins over the image's plan in a child (yaml is heavy, and wanted rarely) and hand it to PID 1."""
    done = ran([sys.executable, "-I", "-m", "init.dropins.merge", "merge", PLAN])
    if done.returncode:
        raise DropInError("apply the drop-ins", done.stderr.strip() or f"exit {done.returncode}")
    with Client(control, within=60.0) as client:
        return client.request("apply", plan=json.loads(done.stdout))


def main(control: Path = SOCKET) -> int:
    watcher = Watcher()
    watches: list[SlurmWatch | DropInWatch | AskedWatch] = []
    directories = list(DROPINS)
    if PROGRAM.exists():
        pod = Pod(os.environ)
        files, kept = SlurmFiles(pod), Kept(pod)
        directories += [files.mounted, kept.directory]
        SAID.unlink(missing_ok=True)  # of another life of ours: PID 1 is told anew
        watches.append(SlurmWatch(control, files, Slurmctld(control), kept))
    if DIRECTORY.is_dir():
        directories.append(DIRECTORY)
        watches.append(AskedWatch(control))
    for directory in directories:
        watcher.watch(directory)
    watches.append(DropInWatch(control, DROPINS))
    notify("READY=1")
    while True:
        for watch in watches:
            watch.look()
        watcher.wait(min((watch.again for watch in watches if watch.again is not None), default=None))
        watcher.wait_until_quiet(QUIET)
        for directory in directories:
            watcher.watch(directory)  # one that has appeared, or was replaced


if __name__ == "__main__":
    raise SystemExit(main())
