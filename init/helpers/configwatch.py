"""Watch the mounted configuration, apply each change, or report why not. A service of every role.

Three watches look at their files at the start and after each change; the kernel reports changes, nothing polls:

- `SlurmWatch` (controller): slurm.conf. One of Slurm's own clients reads a candidate beside the live file; then the
  candidate is compared with the jobs that it would end, installed, and loaded by `scontrol reconfigure`. If slurmctld
  refuses it, the installed files are restored, and the running configuration stays. The running one is saved for the
  next pod.
- `DropInWatch`: the services' drop-ins. The merged plan goes to PID 1, which restarts only what differs.
- `RestartRequestWatch`: requests to restart slurmd, in an annotation of the pod.
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
    assess,
    load_judgement,
    objections,
    save_judgement,
)
from init.slurm.client import is_slurmctld_installed
from init.slurm.daemon import ReconfigureAnswer, ReconfigureOutcome, Slurmctld
from init.slurm.files import LastGoodConfig, SlurmFiles, digest

# The directory in which Kubernetes shows the annotation, and the file with the request.
REQUEST_DIRECTORY = Path("/mnt/minivm/asked")
REQUEST_FILE = "restart-slurmd"
SLURMD_SERVICES = ("slurmd", "slurmd-static")
LONGEST_REQUEST = 64  # bytes
RESTART_PAUSE_S = 60.0  # between two restarts


class RestartRequestWatch:
    """Restart slurmd once for each new request, at the earliest a minute after the previous restart.

    The fleet writes a request if Slurm no longer knows a ready node; a person may, too. A user who may write a pod's
    annotations may also delete the pod. A restart ends no job. A request that exists when the pod starts counts as
    done, because slurmd is new.
    """

    def __init__(
        self, control: Path, directory: Path = REQUEST_DIRECTORY, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.control, self.file, self.now = control, directory / REQUEST_FILE, now
        self.look_again_in: float | None = None
        self.handled = self._read_request()
        self.not_before = 0.0  # no restart before this time

    def look(self) -> None:
        self.look_again_in = None
        request = self._read_request()
        if not request or request == self.handled:
            return
        if (remaining := self.not_before - self.now()) > 0:
            self.look_again_in = remaining
            return
        self.handled, self.not_before = request, self.now() + RESTART_PAUSE_S
        try:
            log(f"asked to restart slurmd ({one_line(request)}): {self._restart()}")
        except (InitError, EOFError) as error:
            log(f"asked to restart slurmd ({one_line(request)}): {error}")

    def _restart(self) -> str:
        with Client(self.control) as client:
            name = next((name for name in SLURMD_SERVICES if service(client, name) is not None), "")
            if not name:
                return "there is none"
            client.request("restart", service=name, wait=False)
            return f"{name} restarts"

    def _read_request(self) -> str:
        """Read the request; "" if it cannot be read. Follow Kubernetes' link: no process of the pod can write it."""
        try:
            fd = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(fd, LONGEST_REQUEST).decode(errors="replace").strip()
        except OSError:
            return ""
        finally:
            os.close(fd)


DROPINS = [
    Path(root) / name for root in ("/etc/minivm", "/mnt/minivm/config") for name in ("services.d", "supervisor.d")
]
DROPINS_DIGEST = Path("/run/minivm/drop-ins-seen")
# Seconds until the next look: for a slurmctld that does not answer yet, and for a full volume.
RETRY_S = 5.0
RETRY_SAVE_S = 60.0
# Seconds without a change: a ConfigMap's swap is one rename, but a manual copy is several writes.
QUIET_S = 0.2
RESTARTED = "; slurmctld hung and was restarted"


class DropInError(InitError):
    """Changed drop-ins are not applied; the running services stay."""


class SlurmWatch:
    """Apply the mounted slurm.conf. A refused one is tried again only when it changes, or when a person accepts it."""

    condition = "slurm.conf"

    def __init__(
        self,
        control: Path,
        files: SlurmFiles,
        daemon: Slurmctld,
        last_good: LastGoodConfig,
        judgement: Path = JUDGEMENT,
    ) -> None:
        self.control = control
        self.files = files
        self.daemon = daemon
        self.last_good = last_good
        self.judgement_file = judgement
        self.refused = ""  # the digest of the refused files, and the acceptance at that time
        self.look_again_in: float | None = None  # seconds, if a look is incomplete
        self.is_unsaved = False  # the next pod would not start from the running configuration

    def look(self) -> None:
        self.look_again_in = None
        try:
            self.files.put_back()  # remains of an attempt that was interrupted, or that found the disk full
        except InitError as error:
            self.look_again_in = RETRY_S
            log(str(error))
            return
        # Read before the files, so that the acceptance is of these files or of earlier ones.
        accepted = self.last_good.read_acceptance()
        files = self.files.read_mounted()
        if files is None:
            return
        if self.files.runs_with(files):
            self._confirm(files, accepted)
            return
        files_digest = digest(files)
        if self.refused == f"{files_digest} {accepted}":
            return
        began = time.monotonic()
        answer = self.apply(files, accepted=accepted.split(" ")[0] == files_digest)
        if answer.outcome is ReconfigureOutcome.LIVE:
            self._confirm(files, accepted)
            took = time.monotonic() - began
            log(f"new configuration ({', '.join(sorted(files))}): {answer.text} after {took:.2f} s")
        elif self.last_good.read_acceptance() != accepted:
            self.look_again_in = 0.0  # a person has accepted files during this try, and waits for another one
        elif answer.outcome is ReconfigureOutcome.UNKNOWN:
            self.look_again_in = RETRY_S
            self._report(SavedJudgement(files_digest, REFUSED, f"refused, the last one stays: {answer.text}"))
        else:
            self.refused = f"{files_digest} {accepted}"
            self._report(SavedJudgement(files_digest, REFUSED, f"refused, the last one stays: {answer.text}"))

    def _confirm(self, files: dict[str, bytes], accepted: str) -> None:
        """Confirm installed files. Once slurmctld answers with them, the next pod starts from them.

        An acceptance of them or of earlier files is then spent: the same files, mounted again later, may end other
        jobs.
        """
        self.refused = ""
        if self.last_good.read() != files:
            if not self.daemon.answers():
                self.look_again_in = RETRY_S
                self._report_failed_start(files)
                return
            try:
                self.last_good.keep(files)
            except InitError as error:  # a full volume: the cluster runs, which matters most
                self._go_on_unsaved(files, error)
                return
        self.is_unsaved = False
        self.last_good.spend(accepted)
        self._report(SavedJudgement(digest(files), LIVE))

    def _report_failed_start(self, files: dict[str, bytes]) -> None:
        if reason := self.daemon.does_not_start():
            # A client names the wrong key; slurmctld's last line does not.
            reason = self.daemon.objects_to(self.files.write_candidate(files)) or reason
            self._report(SavedJudgement(digest(files), REFUSED, f"slurmctld does not start with it: {reason}"))

    def _go_on_unsaved(self, files: dict[str, bytes], error: InitError) -> None:
        if not self.is_unsaved:
            log(f"{error}; the next pod starts from what is mounted then")
        self.is_unsaved, self.look_again_in = True, RETRY_SAVE_S
        self.last_good.drop()
        self._report(SavedJudgement(digest(files), LIVE))

    def apply(self, files: dict[str, bytes], *, accepted: bool = False) -> ReconfigureAnswer:
        """Try the files; try once more if slurmctld did not answer, because then it has not evaluated them."""
        answer, was_restarted = self._try(files, accepted=accepted)
        if answer.outcome is ReconfigureOutcome.SILENT:
            log(f"{answer.text}{RESTARTED if was_restarted else ''}; the new configuration is tried once more")
            answer, was_restarted = self._try(files, accepted=accepted)
        return answer._replace(text=f"{answer.text}{RESTARTED}") if was_restarted else answer

    def _try(self, files: dict[str, bytes], *, accepted: bool) -> tuple[ReconfigureAnswer, bool]:
        """Let a client read the files, weigh them, install them, and let slurmctld load them.

        If slurmctld does not run with them, restore the old files and wait until slurmctld answers. Also tell if
        slurmctld hung and was restarted for that.
        """
        try:
            if objection := objections(self.files, self.daemon, files):
                return ReconfigureAnswer(ReconfigureOutcome.REFUSED, objection), False
            if not accepted and (answer := self._assess(files)) is not None:
                return answer, False
            answer = self._reload(files)
            if answer.outcome is ReconfigureOutcome.LIVE:
                self.files.keep()
                return answer, False
            self.files.put_back()
            return answer, self.daemon.revive()
        except InitError as error:
            return ReconfigureAnswer(ReconfigureOutcome.REFUSED, error.why), False

    def _assess(self, files: dict[str, bytes]) -> ReconfigureAnswer | None:
        """Refuse files that would end jobs; None if they would end none."""
        effect = assess(self.files, self.daemon, files)
        if not effect.losses:
            return None
        way_out = f"`minivm config accept {digest(files)}` applies it anyway"
        is_unknown = any(loss.jobs is None for loss in effect.losses)
        outcome = ReconfigureOutcome.UNKNOWN if is_unknown else ReconfigureOutcome.REFUSED
        return ReconfigureAnswer(outcome, f"it would end jobs: {effect.cost}; {way_out}")

    def _reload(self, files: dict[str, bytes]) -> ReconfigureAnswer:
        try:
            self.files.install(files)
            return self.daemon.reload()
        except InitError as error:
            return ReconfigureAnswer(ReconfigureOutcome.REFUSED, error.why)

    def _report(self, judgement: SavedJudgement) -> None:
        if load_judgement(self.judgement_file) == judgement:
            return
        if judgement.why:
            log(f"{self.condition}: {judgement.why}")
        condition(self.control, self.condition, judgement.why)
        save_judgement(judgement, self.judgement_file)


class DropInWatch:
    """Apply changed drop-ins. Their digest is saved, so that a change while this service was down is noticed."""

    condition = "drop-ins"

    def __init__(self, control: Path, directories: Iterable[Path], digest_file: Path = DROPINS_DIGEST) -> None:
        self.control = control
        self.look_again_in: float | None = None
        self.directories = list(directories)
        self.digest_file = digest_file
        try:
            self.seen = digest_file.read_text()
        except (OSError, ValueError):
            self._remember(fingerprint(self.directories))

    def _remember(self, digest: str) -> None:
        self.seen = digest
        with contextlib.suppress(InitError, OSError):  # a full disk: it is remembered while this process lives
            self.digest_file.parent.mkdir(parents=True, exist_ok=True)
            write(self.digest_file, digest.encode(), mode=0o600)

    def look(self) -> None:
        self.look_again_in = None
        current = fingerprint(self.directories)
        if current == self.seen:
            return
        try:
            change = apply_dropins(self.control)
        except OSError as error:  # no process available: the files are not evaluated yet
            log(f"{self.condition}: not read yet: {error.strerror}")
            self.look_again_in = RETRY_S
            return
        except InitError as error:
            self._remember(current)
            log(f"{self.condition}: refused: {error.why}")
            condition(self.control, self.condition, f"refused: {error.why}")
            return
        self._remember(current)
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
    """Look at everything once, then again after each change in a watched directory, or when a watch asked for it."""
    watcher = Watcher()
    watches: list[SlurmWatch | DropInWatch | RestartRequestWatch] = []
    directories = list(DROPINS)
    if is_slurmctld_installed():
        pod = Pod(os.environ)
        files, last_good = SlurmFiles(pod), LastGoodConfig(pod)
        directories += [files.mounted, last_good.directory]
        JUDGEMENT.unlink(missing_ok=True)  # left by an earlier process: report the condition to PID 1 again
        watches.append(SlurmWatch(control, files, Slurmctld(control), last_good))
    if REQUEST_DIRECTORY.is_dir():
        directories.append(REQUEST_DIRECTORY)
        watches.append(RestartRequestWatch(control))
    for directory in directories:
        watcher.watch(directory)
    watches.append(DropInWatch(control, DROPINS))
    notify("READY=1")
    while True:
        for watch in watches:
            watch.look()
        watcher.wait(min((watch.look_again_in for watch in watches if watch.look_again_in is not None), default=None))
        watcher.wait_until_quiet(QUIET_S)
        for directory in directories:
            watcher.watch(directory)  # one that has appeared, or was replaced


if __name__ == "__main__":
    raise SystemExit(main())
