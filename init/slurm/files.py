"""The controller's slurm.conf and its neighbours: mounted, installed for slurmctld, and kept beside its state.

The kept copy is the last configuration that slurmctld ran with, from which the next pod starts. A boot step reads it,
so imports stay few.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from ground.files import read_plain
from init.pod.pod import MOUNTS, Pod, PrepareError, user, write
from init.slurm.place import place_files

MOUNT = f"{MOUNTS}/config/slurm"
TARGET = "/etc/slurm"
SUFFIXES = (".conf", ".lua", ".yaml")
# Files with a password: only slurmdbd may read them.
PRIVATE = ("slurmdbd.conf",)
MAIN = "slurm.conf"
CANDIDATE = Path("/run/minivm/slurm-candidate")
BEFORE = "/run/minivm/slurm-before.json"
# The last good files, and the hash of files that a person accepted at any cost.
DIRECTORY = "/var/lib/minivm/slurm"
GOOD, ACCEPTED = "good.json", "accepted"
DIGITS = 12
HOLDS = 16 << 20  # bytes: far above anything that Slurm reads


class SlurmFiles:
    """Configuration files by name. A file that is no longer mounted stays installed; slurm.conf may not name it."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.mounted = pod.path(MOUNT)
        self.target = pod.path(TARGET)
        self.before = pod.path(BEFORE)  # files before an attempt; an interrupted attempt is undone from it

    def read_mounted(self) -> dict[str, bytes] | None:
        """Return the mounted files; None without any, or during a swap, whose end triggers another event."""
        try:
            files = place_files(self.pod, read(self.mounted))
        except OSError:
            return None
        return files if MAIN in files else None

    def read_installed(self) -> dict[str, bytes]:
        return read(self.target)

    def runs_with(self, files: Mapping[str, bytes]) -> bool:
        installed = self.read_installed()
        return all(installed.get(name) == data for name, data in files.items())

    def write_candidate(self, files: Mapping[str, bytes], directory: Path = CANDIDATE) -> Path:
        """Write the installed files, overridden by these, elsewhere, for a client that tests them."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o755)
        for name, data in {**self.read_installed(), **files}.items():
            if name not in PRIVATE:
                write(directory / name, data, mode=0o644)
        return directory / MAIN

    def install(self, files: Mapping[str, bytes]) -> None:
        """Install the files for an attempt: until `keep`, `put_back` restores the old ones, also after a crash."""
        before = self.read_installed()
        backup = {name: data.decode("utf-8", "surrogateescape") for name, data in before.items()}
        text = json.dumps({"files": backup, "added": sorted(set(files) - set(before))})
        self.before.parent.mkdir(parents=True, exist_ok=True)
        write(self.before, text.encode(), mode=0o600)
        self.put(files)

    def keep(self) -> None:
        """Keep the installed files: the attempt has succeeded."""
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
        self.keep()

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            private = name in PRIVATE
            owner = user("slurm") if private else (0, 0)
            write(self.target / name, data, mode=0o600 if private else 0o644, owner=owner)


def read(directory: Path) -> dict[str, bytes]:
    """Return the configuration files of a directory."""
    return {path.name: path.read_bytes() for path in list_mounted_files(directory)}


def list_mounted_files(directory: Path) -> list[Path]:
    """List configuration and its scripts, without dot files such as Kubernetes' `..data`."""
    paths = directory.glob("[!.]*") if directory.is_dir() else ()
    return sorted(path for path in paths if is_configuration(path.name) and path.is_file())


def is_configuration(name: str) -> bool:
    """Tell if Slurm reads the file; the rest, such as pools.json, is for minivm."""
    return Path(name).suffix in SUFFIXES


def decode_config_map(text: str) -> dict[str, bytes]:
    """Return what read() would return for this ConfigMap once mounted, so that the hash is the same."""
    from init.dropins.merge import config_map

    return {name: data for name, data in config_map(text, MAIN).items() if is_configuration(name)}


def decode_given(data: bytes) -> dict[str, bytes]:
    """Return the files of a ConfigMap's manifest; any other text is a slurm.conf."""
    if any(line.startswith(b"kind:") for line in data.splitlines()):
        return decode_config_map(data.decode(errors="replace"))
    return {MAIN: data}


class LastGoodConfig:
    def __init__(self, pod: Pod) -> None:
        self.directory = pod.path(DIRECTORY)

    def read(self) -> dict[str, bytes] | None:
        """Return name -> content; None if it is missing or unreadable."""
        text = self._read(GOOD)
        if text is None:
            return None
        try:
            data = json.loads(text)
        except ValueError:
            return None
        if not isinstance(data, dict) or not all(isinstance(item, str) for pair in data.items() for item in pair):
            return None
        return {str(name): str(content).encode("utf-8", "surrogateescape") for name, content in data.items()}

    def keep(self, files: Mapping[str, bytes]) -> None:
        content = {name: data.decode("utf-8", "surrogateescape") for name, data in sorted(files.items())}
        self._write(GOOD, json.dumps(content))

    def read_acceptance(self) -> str:
        """Return the accepted hash with its time: accepting the same one again is a new decision."""
        return (self._read(ACCEPTED) or "").strip()

    def accept(self, digest: str, at: float) -> None:
        self._write(ACCEPTED, f"{digest} {at:.3f}\n")

    def spend(self, accepted: str) -> None:
        """Remove an acceptance, unless a person has accepted again meanwhile."""
        if accepted and self.read_acceptance() == accepted:
            self._unlink(ACCEPTED)

    def drop(self) -> None:
        """Drop an outdated copy: starting from it, a new pod would end the jobs of newer partitions."""
        self._unlink(GOOD)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()

    def _read(self, name: str) -> str | None:
        """Read a file of root's, never a link: the Slurm user also writes to the volume."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            data = read_plain(self.directory / name, HOLDS, trusted=True)
            return None if data is None else data.decode()
        return None

    def _write(self, name: str, text: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.directory.chmod(0o700)
        except OSError as error:
            raise PrepareError(f"keep {self.directory / name}", error.strerror or str(error)) from error
        write(self.directory / name, text.encode(), mode=0o600)


def digest(files: Mapping[str, bytes]) -> str:
    """Return the hash of exactly these files, which a person confirms."""
    from hashlib import sha256

    total = sha256()
    for name, data in sorted(files.items()):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:DIGITS]
