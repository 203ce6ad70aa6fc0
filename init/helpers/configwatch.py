"""Watch the mounted configuration, apply changes, or report why not. A service of every role.

slurm.conf (controller): one of Slurm's own clients reads a candidate beside the live file; then the candidate is
compared with the jobs that it would end, installed, and loaded by `scontrol reconfigure`. If slurmctld refuses it, the
installed files are restored, and the running configuration stays. The running one is kept for the next pod. Service
drop-ins: the merged plan goes to PID 1, which restarts only what differs. Nothing polls: the kernel reports changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ground.commands import ran
from ground.errors import one_line
from ground.sockets import notify
from init.errors import InitError
from init.places import PLAN
from init.pod.client import SOCKET, Client, condition, log, service
from init.pod.dirwatch import Watcher
from init.pod.pod import Pod, write
from init.slurm.change import (
    JUDGEMENT,
    LIVE,
    REFUSED,
    SavedJudgement,
    load_judgement,
    objections,
    save_judgement,
    weigh,
)
from init.slurm.daemon import PROGRAM, ReconfigureAnswer, ReconfigureOutcome, Slurmctld
from init.slurm.files import LastGoodConfig, SlurmFiles, digest

# A request to restart slurmd: an annotation of the pod, which Kubernetes shows as a file.
# The fleet writes it if Slurm no longer knows a ready node; a person may, too. A user who may write a pod's annotations
# may also delete the pod. A restart ends no job. A request that exists when the pod starts counts as done, because
# slurmd is new.
DIRECTORY = Path("/mnt/minivm/asked")
WORD = "restart-slurmd"
SLURMDS = ("slurmd", "slurmd-static")
# Bytes of a request, and seconds between two restarts.
MOST, REST_S = 64, 60.0


class AskedWatch:
    """Restart slurmd once for each new request, at the earliest a minute after the previous restart."""

    def __init__(self, control: Path, directory: Path = DIRECTORY, now: Callable[[], float] = time.monotonic) -> None:
        self.control, self.file, self.now = control, directory / WORD, now
        self.again: float | None = None
        self.heeded = self._word()
        self.not_before = 0.0  # no restart before this time

    def look(self) -> None:
        self.again = None
        word = self._word()
        if not word or word == self.heeded:
            return
        if (remaining := self.not_before - self.now()) > 0:
            self.again = remaining
            return
        self.heeded, self.not_before = word, self.now() + REST_S
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
        """Read the request; "" if it cannot be read. Follow Kubernetes' link: no process of the pod can write it."""
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


DROPINS = [
    Path(root) / name for root in ("/etc/minivm", "/mnt/minivm/config") for name in ("services.d", "supervisor.d")
]
SEEN = Path("/run/minivm/drop-ins-seen")
ASK_AGAIN = 5.0  # seconds: for a slurmctld that does not answer yet
KEEP_AGAIN = 60.0  # for a full volume
# A ConfigMap's swap is one rename; a manual copy is several writes.
QUIET = 0.2
KILLED = "; slurmctld hung and was restarted"


class DropInError(InitError):
    """Changed drop-ins are not applied; the running services stay."""


class SlurmWatch:
    """The mounted slurm.conf. A refused one is tried again only when it changes, or when a person accepts it."""

    condition = "slurm.conf"

    def __init__(
        self, control: Path, files: SlurmFiles, daemon: Slurmctld, kept: LastGoodConfig, saved: Path = JUDGEMENT
    ) -> None:
        self.control = control
        self.files = files
        self.daemon = daemon
        self.kept = kept
        self.saved = saved
        self.refused = ""  # the hash of those files, and the acceptance at that time
        self.again: float | None = None  # seconds, if a look is incomplete
        self.unkept = False

    def look(self) -> None:
        self.again = None
        try:
            self.files.put_back()  # remains of an attempt that was interrupted, or that found the disk full
        except InitError as error:
            self.again = ASK_AGAIN
            log(str(error))
            return
        # Read before the files, so that the acceptance is of these files or of earlier ones.
        accepted = self.kept.accepted()
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
        if answer.outcome is ReconfigureOutcome.LIVE:
            self._confirm(files, accepted)
            took = time.monotonic() - began
            log(f"new configuration ({', '.join(sorted(files))}): {answer.text} after {took:.2f} s")
        elif answer.outcome is ReconfigureOutcome.UNKNOWN:
            self.again = ASK_AGAIN
            self._tell(SavedJudgement(named, REFUSED, f"refused, the last one stays: {answer.text}"))
        else:
            self.refused = f"{named} {accepted}"
            self._tell(SavedJudgement(named, REFUSED, f"refused, the last one stays: {answer.text}"))

    def _confirm(self, files: dict[str, bytes], accepted: str) -> None:
        """Confirm installed files. Once slurmctld answers with them, the next pod starts from them.

        An acceptance of them or of earlier files is then spent: the same files, mounted again later, may end other
        jobs.
        """
        self.refused = ""
        if self.kept.good() != files:
            if not self.daemon.answers():
                self.again = ASK_AGAIN
                reason = self.daemon.does_not_start()
                if reason:  # a client names the key; slurmctld's last line does not
                    reason = self.daemon.objects_to(self.files.candidate(files)) or reason
                    self._tell(SavedJudgement(digest(files), REFUSED, f"slurmctld does not start with it: {reason}"))
                return
            try:
                self.kept.keep(files)
            except InitError as error:  # a full volume: the cluster runs, which matters most
                if not self.unkept:
                    log(f"{error}; the next pod starts from what is mounted then")
                self.unkept, self.again = True, KEEP_AGAIN
                self.kept.drop()
                self._tell(SavedJudgement(digest(files), LIVE))
                return
        self.unkept = False
        self.kept.spend(accepted)
        self._tell(SavedJudgement(digest(files), LIVE))

    def apply(self, files: dict[str, bytes], *, accepted: bool = False) -> ReconfigureAnswer:
        """Try the files; try once more if slurmctld did not answer, because then it has not evaluated them."""
        answer, killed = self._try(files, accepted=accepted)
        if answer.outcome is ReconfigureOutcome.SILENT:
            log(f"{answer.text}{KILLED if killed else ''}; the new configuration is tried once more")
            answer, killed = self._try(files, accepted=accepted)
        return answer._replace(text=f"{answer.text}{KILLED}") if killed else answer

    def _try(self, files: dict[str, bytes], *, accepted: bool) -> tuple[ReconfigureAnswer, bool]:
        """Let a client read the files, weigh them, install them, and let slurmctld load them.

        If slurmctld does not run with them, restore the old files and wait until slurmctld answers.
        """
        try:
            objection = objections(self.files, self.daemon, files)
            if objection:
                return ReconfigureAnswer(ReconfigureOutcome.REFUSED, objection), False
            if not accepted:
                effect = weigh(self.files, self.daemon, files)
                if effect.losses:
                    unknown = any(loss.jobs is None for loss in effect.losses)
                    way = f"`minivm config accept {digest(files)}` applies it anyway"
                    text = f"it would end jobs: {effect.cost}; {way}"
                    return ReconfigureAnswer(
                        ReconfigureOutcome.UNKNOWN if unknown else ReconfigureOutcome.REFUSED, text
                    ), False
            answer = self._reload(files)
            if answer.outcome is ReconfigureOutcome.LIVE:
                self.files.taken()
                return answer, False
            self.files.put_back()
            return answer, self.daemon.revive()
        except InitError as error:
            return ReconfigureAnswer(ReconfigureOutcome.REFUSED, error.why), False

    def _reload(self, files: dict[str, bytes]) -> ReconfigureAnswer:
        try:
            self.files.install(files)
            return self.daemon.reload()
        except InitError as error:
            return ReconfigureAnswer(ReconfigureOutcome.REFUSED, error.why)

    def _tell(self, judgement: SavedJudgement) -> None:
        if load_judgement(self.saved) == judgement:
            return
        if judgement.why:
            log(f"{self.condition}: {judgement.why}")
        condition(self.control, self.condition, judgement.why)
        save_judgement(judgement, self.saved)


class DropInWatch:
    """The services' drop-ins. The last seen state is saved, so that a change while this service was down is noticed."""

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
        with contextlib.suppress(InitError, OSError):  # a full disk: it is remembered while this process lives
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            write(self.kept, now.encode(), mode=0o600)

    def look(self) -> None:
        self.again = None
        now = fingerprint(self.directories)
        if now == self.seen:
            return
        try:
            change = apply_dropins(self.control)
        except OSError as error:  # no process available: the files are not evaluated yet
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
    """Hash name and content of every readable file."""
    hasher = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.glob("[!.]*")) if directory.is_dir() else []:
            with contextlib.suppress(OSError):
                if path.is_file():
                    data = path.read_bytes()
                    hasher.update(f"{len(str(path))} {len(data)} {path}".encode(errors="surrogateescape") + data)
    return hasher.hexdigest()


def apply_dropins(control: Path) -> dict[str, Any]:
    """Merge the drop-ins into the image's plan in a child (yaml is large and rarely needed), and send it to PID 1."""
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
        files, last_good = SlurmFiles(pod), LastGoodConfig(pod)
        directories += [files.mounted, last_good.directory]
        JUDGEMENT.unlink(missing_ok=True)  # left by an earlier process: report the condition to PID 1 again
        watches.append(SlurmWatch(control, files, Slurmctld(control), last_good))
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
