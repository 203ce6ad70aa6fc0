"""The controller's slurm.conf and its neighbours: as they are mounted, and as they are installed for slurmctld."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from init.pod.pod import MOUNTS, Pod, user, write

MOUNT = f"{MOUNTS}/config/slurm"
TARGET = "/etc/slurm"
SUFFIXES = (".conf", ".lua", ".yaml")
# Files that hold a password: only slurmdbd may read them.
PRIVATE = ("slurmdbd.conf",)
MAIN = "slurm.conf"
CANDIDATE = Path("/run/minivm/slurm-candidate")
BEFORE = "/run/minivm/slurm-before.json"


class SlurmFiles:
    """Name and content; a file that is mounted no more stays as it is, since slurm.conf may not name it."""

    def __init__(self, pod: Pod) -> None:
        self.mounted = pod.path(MOUNT)
        self.target = pod.path(TARGET)
        self.before = pod.path(BEFORE)  # what a try began with: whoever was cut in the middle of one puts it back

    def wanted(self) -> dict[str, bytes] | None:
        """The mounted files; None where there are none, or in the middle of a swap: its end is told too."""
        try:
            files = read(self.mounted)
        except OSError:
            return None
        return files if MAIN in files else None

    def installed(self) -> dict[str, bytes]:
        return read(self.target)

    def runs_with(self, files: Mapping[str, bytes]) -> bool:
        installed = self.installed()
        return all(installed.get(name) == data for name, data in files.items())

    def candidate(self, files: Mapping[str, bytes], directory: Path = CANDIDATE) -> Path:
        """The installed files with these in their place, elsewhere, for a client that tries them."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o755)
        for name, data in {**self.installed(), **files}.items():
            if name not in PRIVATE:
                write(directory / name, data, mode=0o644)
        return directory / MAIN

    def install(self, files: Mapping[str, bytes]) -> None:
        """For a try: until they are `taken` they can be put back, also after a crash."""
        before = self.installed()
        kept = {name: data.decode("utf-8", "surrogateescape") for name, data in before.items()}
        text = json.dumps({"files": kept, "added": sorted(set(files) - set(before))})
        self.before.parent.mkdir(parents=True, exist_ok=True)
        write(self.before, text.encode(), mode=0o600)
        self.put(files)

    def taken(self) -> None:
        self.before.unlink(missing_ok=True)

    def put_back(self) -> None:
        """What was there before a try that was not taken; nothing where there is none."""
        try:
            found = json.loads(self.before.read_text())
        except FileNotFoundError:
            return
        self.put({name: text.encode("utf-8", "surrogateescape") for name, text in found["files"].items()})
        for name in found["added"]:
            (self.target / name).unlink(missing_ok=True)
        self.taken()

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            private = name in PRIVATE
            owner = user("slurm") if private else (0, 0)
            write(self.target / name, data, mode=0o600 if private else 0o644, owner=owner)


def read(directory: Path) -> dict[str, bytes]:
    """The configuration files of a directory as they are now, whole."""
    return {path.name: path.read_bytes() for path in mounted_files(directory)}


def mounted_files(directory: Path) -> list[Path]:
    """Configuration and its scripts. Kubernetes' own `..data` beside them starts with a dot."""
    found = directory.glob("[!.]*") if directory.is_dir() else ()
    return sorted(path for path in found if is_configuration(path.name) and path.is_file())


def is_configuration(name: str) -> bool:
    """And not what the chart tells others beside it, as pools.json."""
    return Path(name).suffix in SUFFIXES


def of_config_map(text: str) -> dict[str, bytes]:
    """What read() would find where this ConfigMap is mounted: the hash is of these, whichever way they come."""
    from init.dropins.merge import config_map

    return {name: data for name, data in config_map(text, MAIN).items() if is_configuration(name)}
