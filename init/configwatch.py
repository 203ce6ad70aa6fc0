"""Watches the mounted configuration and applies what has changed, or says why not. A service of every role.

slurm.conf (controller): a candidate is parsed beside the live file by one of Slurm's own clients, then installed, then
`scontrol reconfigure`; what slurmctld refuses is taken back, and the running one stays as it is. Service drop-ins: the
merged plan goes to PID 1, which touches only what differs. Nothing polls: the kernel says when to look.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from init.client import SOCKET, Client
from init.dirwatch import Watcher
from init.errors import InitError
from init.places import PLAN
from init.prepare.pod import Pod, user, write
from init.prepare.slurm_config import MOUNT, PRIVATE, TARGET, mounted_files
from init.sd_notify import notify
from init.slurm_client import SCONTROL

DROPINS = [
    Path(root) / name for root in ("/etc/minivm", "/mnt/minivm/config") for name in ("services.d", "supervisor.d")
]
CANDIDATE = Path("/run/minivm/slurm-candidate")
SLURMCTLD = Path("/usr/sbin/slurmctld")
# A ConfigMap's swap is one rename; a copy by hand is several writes.
QUIET = 0.2
# How often, and how long each time, slurmctld is asked whether it lives after it has refused a file.
PINGS, PATIENCE = 3, 4.0
SLURM, SERVICES = "slurm.conf", "drop-ins"


class ConfigurationError(InitError):
    """A changed configuration that is not applied; the running one stays."""


def read_files(directory: Path) -> dict[str, bytes]:
    """The configuration files of a directory as they are now, whole."""
    return {path.name: path.read_bytes() for path in mounted_files(directory)}


def fingerprint(directories: list[Path]) -> tuple[tuple[str, bytes], ...]:
    found = []
    for directory in directories:
        for path in sorted(directory.glob("*")) if directory.is_dir() else []:
            with contextlib.suppress(OSError):
                if not path.name.startswith(".") and path.is_file():
                    found.append((str(path), path.read_bytes()))
    return tuple(found)


class SlurmConfiguration:
    """The mounted slurm.conf and its neighbours, and what of them slurmctld runs with."""

    def __init__(self, control: Path, pod: Pod) -> None:
        self.control = control
        self.source = pod.path(MOUNT)
        self.target = pod.path(TARGET)
        self.applied = read_files(self.target)

    def changed(self) -> dict[str, bytes] | None:
        """The new files, or None when they are what is installed."""
        try:
            files = read_files(self.source)
        except OSError:
            return None  # in the middle of a swap: its end is an event too
        if "slurm.conf" not in files or all(self.applied.get(name) == data for name, data in files.items()):
            return None
        return files

    def apply(self, files: Mapping[str, bytes]) -> str:
        """Test, install, reconfigure. On a refusal everything is put back, and the reason raised."""
        parse(files, self.target)
        before = read_files(self.target)
        self.install(files)
        try:
            text = self.reconfigure()
        except ConfigurationError as error:
            self.install(before)
            for name in set(files) - set(before):
                (self.target / name).unlink(missing_ok=True)
            if self.revive():
                raise ConfigurationError(error.what, f"{error.why}; slurmctld hung on it and was restarted") from error
            raise
        self.applied = read_files(self.target)
        return text

    def install(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            private = name in PRIVATE
            owner = user("slurm") if private else (0, 0)
            write(self.target / name, data, mode=0o600 if private else 0o644, owner=owner)

    def reconfigure(self) -> str:
        with Client(self.control, within=120.0) as client:
            view = next((view for view in client.snapshot().services if view.name == "slurmctld"), None)
            if view is None:
                raise ConfigurationError("reconfigure slurmctld", "this pod has none")
            if view.state in ("failed", "backoff", "stopped"):
                # The file that kept it from starting has been mended.
                reply = client.request("start", service="slurmctld", wait=True)
                if not reply.get("ready"):
                    raise ConfigurationError(
                        "start slurmctld", "; ".join(reply.get("reasons", [])) or "it is not ready"
                    )
                return "slurmctld is started with it"
            marker = len(self.log(client))
        done = subprocess.run(
            [SCONTROL, "reconfigure"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode == 0:
            return "slurmctld runs with it"
        with Client(self.control) as client:
            new = self.log(client)[marker:] or self.log(client)[-30:]
        raise ConfigurationError("reconfigure slurmctld", complaint(new, done.stderr))

    def revive(self) -> bool:
        """True when slurmctld had to be killed: after a refused reconfigure 24.11 sometimes hangs for ever.

        It has saved its state just before, jobs run on without it, and PID 1 starts it again at once.
        """
        for _ in range(PINGS):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if (
                    subprocess.run([SCONTROL, "ping"], capture_output=True, check=False, timeout=PATIENCE).returncode
                    == 0
                ):
                    return False
        with Client(self.control) as client:
            client.request("signal", service="slurmctld", signal="KILL")
        return True

    @staticmethod
    def log(client: Client) -> list[str]:
        lines = client.request("logs", service="slurmctld", lines=400)["lines"]
        return [str(line) for line in lines]


def complaint(log: list[str], stderr: str) -> str:
    """slurmctld tells its log why, and its client only "Unspecified error"."""
    for mark in ("fatal: ", "error: "):
        found = [line.partition(mark)[2] for line in log if mark in line]
        if found and (mark == "fatal: " or not stderr.strip()):
            return found[-1].strip()
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "refused without a reason"


def parse(files: Mapping[str, bytes], neighbours: Path, candidate: Path = CANDIDATE) -> None:
    """A client that reads the candidate tells unknown keys, bad values, missing plugins: nothing is touched before."""
    shutil.rmtree(candidate, ignore_errors=True)
    candidate.mkdir(parents=True, mode=0o755)
    for name, data in {**read_files(neighbours), **files}.items():
        if name not in PRIVATE:
            write(candidate / name, data, mode=0o644)
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_CONF": str(candidate / "slurm.conf")}
    try:
        done = subprocess.run(
            [SCONTROL, "ping"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            check=False,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return  # it was read, and the controller it names does not answer: reconfigure will tell
    wrong = [line.partition(mark)[2] for line in done.stderr.splitlines() for mark in ("error: ",) if mark in line]
    if "fatal:" in done.stderr:
        text = "; ".join(item.strip() for item in wrong) or done.stderr.strip()
        raise ConfigurationError("use the new slurm.conf", text.replace(f"{candidate}/", ""))


def apply_dropins(control: Path = SOCKET, plan: str = PLAN) -> dict[str, Any]:
    """Merge the drop-ins over the image's plan in a child (yaml is heavy, and wanted rarely) and hand it to PID 1."""
    import json

    done = subprocess.run(
        [sys.executable, "-I", "-m", "init.dropins", "merge", plan],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigurationError("apply the drop-ins", done.stderr.strip() or f"exit {done.returncode}")
    with Client(control, within=60.0) as client:
        return client.request("apply", plan=json.loads(done.stdout))


def condition(control: Path, name: str, text: str) -> None:
    with Client(control) as client:
        client.request("condition", name=name, text=text)


def say(text: str) -> None:
    print(text, flush=True)


class Watch:
    """One look after each change; a part that is refused is looked at again only when it changes again."""

    def __init__(self, control: Path = SOCKET, pod: Pod | None = None) -> None:
        self.control = control
        pod = pod or Pod(os.environ)
        self.slurm = SlurmConfiguration(control, pod) if SLURMCTLD.exists() else None
        self.dropins = fingerprint(DROPINS)
        self.refused: dict[str, bytes] = {}

    def look(self) -> None:
        if self.slurm is not None:
            self._slurm(self.slurm)
        now = fingerprint(DROPINS)
        if now != self.dropins:
            self.dropins = now
            self._services()

    def _slurm(self, slurm: SlurmConfiguration) -> None:
        files = slurm.changed()
        if files is None:
            if self.refused:
                self.refused = {}
                self._tell(SLURM, "")  # the mounted files are the running ones again
            return
        if files == self.refused:
            return
        began = time.monotonic()
        try:
            text = slurm.apply(files)
        except InitError as error:
            self.refused = files
            self._tell(SLURM, f"refused, the last one stays: {error.why}")
            return
        self.refused = {}
        self._tell(SLURM, "")
        say(f"new configuration ({', '.join(sorted(files))}): {text} after {time.monotonic() - began:.2f} s")

    def _services(self) -> None:
        try:
            change = apply_dropins(self.control)
        except InitError as error:
            self._tell(SERVICES, f"refused: {error.why}")
            return
        self._tell(SERVICES, "")
        parts = [f"{what} {' '.join(change[what])}" for what in ("added", "removed", "changed") if change.get(what)]
        say(f"drop-ins applied: {'; '.join(parts) or 'nothing differs'}")

    def _tell(self, name: str, text: str) -> None:
        if text:
            say(f"{name}: {text}")
        condition(self.control, name, text)


def main() -> int:
    watcher = Watcher()
    directories = [*DROPINS, *([Path(MOUNT)] if SLURMCTLD.exists() else [])]
    for directory in directories:
        watcher.watch(directory)
    watch = Watch()
    notify("READY=1")
    while True:
        watch.look()
        watcher.wait(None)
        watcher.settle(QUIET)
        for directory in directories:
            watcher.watch(directory)  # one that has appeared, or was replaced


if __name__ == "__main__":
    raise SystemExit(main())
