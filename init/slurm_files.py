"""The controller's slurm.conf and its neighbours: as they are mounted, and as they are installed for slurmctld."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from init.prepare.pod import Pod, user, write
from init.prepare.slurm_config import MOUNT, PRIVATE, TARGET, mounted_files

MAIN = "slurm.conf"
CANDIDATE = Path("/run/minivm/slurm-candidate")


class SlurmFiles:
    """Name and content; a file that is mounted no more stays as it is, since slurm.conf may not name it."""

    def __init__(self, pod: Pod) -> None:
        self.mounted = pod.path(MOUNT)
        self.target = pod.path(TARGET)

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

    def install(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Returns what was there before."""
        before = self.installed()
        for name, data in files.items():
            private = name in PRIVATE
            owner = user("slurm") if private else (0, 0)
            write(self.target / name, data, mode=0o600 if private else 0o644, owner=owner)
        return before

    def put_back(self, before: Mapping[str, bytes], instead_of: Mapping[str, bytes]) -> None:
        self.install(before)
        for name in set(instead_of) - set(before):
            (self.target / name).unlink(missing_ok=True)


def read(directory: Path) -> dict[str, bytes]:
    """The configuration files of a directory as they are now, whole."""
    return {path.name: path.read_bytes() for path in mounted_files(directory)}
