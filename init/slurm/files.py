"""The controller's slurm.conf and its neighbours, as mounted and as installed for slurmctld."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from init.pod.pod import MOUNTS, Pod, user, write
from init.slurm.place import placed

MOUNT = f"{MOUNTS}/config/slurm"
TARGET = "/etc/slurm"
SUFFIXES = (".conf", ".lua", ".yaml")
# Files with a password: only slurmdbd may read them.
PRIVATE = ("slurmdbd.conf",)
MAIN = "slurm.conf"
CANDIDATE = Path("/run/minivm/slurm-candidate")
BEFORE = "/run/minivm/slurm-before.json"


class SlurmFiles:
    """Configuration files by name. A file that is no longer mounted stays installed; slurm.conf may not name it."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.mounted = pod.path(MOUNT)
        self.target = pod.path(TARGET)
        self.before = pod.path(BEFORE)  # files before an attempt; an interrupted attempt is undone from it

    def wanted(self) -> dict[str, bytes] | None:
        """Return the mounted files; None without any, or during a swap, whose end triggers another event."""
        try:
            files = placed(self.pod, read(self.mounted))
        except OSError:
            return None
        return files if MAIN in files else None

    def installed(self) -> dict[str, bytes]:
        return read(self.target)

    def runs_with(self, files: Mapping[str, bytes]) -> bool:
        installed = self.installed()
        return all(installed.get(name) == data for name, data in files.items())

    def candidate(self, files: Mapping[str, bytes], directory: Path = CANDIDATE) -> Path:
        """Write the installed files, overridden by these, elsewhere, for a client that tests them."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o755)
        for name, data in {**self.installed(), **files}.items():
            if name not in PRIVATE:
                write(directory / name, data, mode=0o644)
        return directory / MAIN

    def install(self, files: Mapping[str, bytes]) -> None:
        """Install the files for an attempt: until `taken`, `put_back` restores the old ones, also after a crash."""
        before = self.installed()
        backup = {name: data.decode("utf-8", "surrogateescape") for name, data in before.items()}
        text = json.dumps({"files": backup, "added": sorted(set(files) - set(before))})
        self.before.parent.mkdir(parents=True, exist_ok=True)
        write(self.before, text.encode(), mode=0o600)
        self.put(files)

    def taken(self) -> None:
        self.before.unlink(missing_ok=True)

    def put_back(self) -> None:
        """Restore the files of before an attempt that was not taken; do nothing without one."""
        try:
            saved = json.loads(self.before.read_text())
        except FileNotFoundError:
            return
        self.put({name: text.encode("utf-8", "surrogateescape") for name, text in saved["files"].items()})
        for name in saved["added"]:
            (self.target / name).unlink(missing_ok=True)
        self.taken()

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            private = name in PRIVATE
            owner = user("slurm") if private else (0, 0)
            write(self.target / name, data, mode=0o600 if private else 0o644, owner=owner)


def read(directory: Path) -> dict[str, bytes]:
    """Return the configuration files of a directory."""
    return {path.name: path.read_bytes() for path in mounted_files(directory)}


def mounted_files(directory: Path) -> list[Path]:
    """List configuration and its scripts, without dot files such as Kubernetes' `..data`."""
    paths = directory.glob("[!.]*") if directory.is_dir() else ()
    return sorted(path for path in paths if is_configuration(path.name) and path.is_file())


def is_configuration(name: str) -> bool:
    """Tell if Slurm reads the file; the rest, such as pools.json, is for minivm."""
    return Path(name).suffix in SUFFIXES


def of_config_map(text: str) -> dict[str, bytes]:
    """Return what read() would return for this ConfigMap once mounted, so that the hash is the same."""
    from init.dropins.merge import config_map

    return {name: data for name, data in config_map(text, MAIN).items() if is_configuration(name)}
