"""The last configuration that slurmctld ran with, kept beside its state: the next pod starts from it.

Also the hash of a configuration that a person accepted at any cost. A boot step reads it, so imports stay few.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from init.lean import read_json
from init.pod.pod import Pod, PrepareError, write

DIRECTORY = "/var/lib/minivm/slurm"
GOOD, ACCEPTED = "good.json", "accepted"
DIGITS = 12
HOLDS = 16 << 20  # bytes: far above anything that Slurm reads


class LastGoodConfig:
    def __init__(self, pod: Pod) -> None:
        self.directory = pod.path(DIRECTORY)

    def good(self) -> dict[str, bytes] | None:
        """Return name -> content; None if it is missing or unreadable."""
        text = self._read(GOOD)
        if text is None:
            return None
        try:
            data = read_json(text)
        except ValueError:
            return None
        if not isinstance(data, dict) or not all(isinstance(item, str) for pair in data.items() for item in pair):
            return None
        return {str(name): str(content).encode("utf-8", "surrogateescape") for name, content in data.items()}

    def keep(self, files: Mapping[str, bytes]) -> None:
        import json

        content = {name: data.decode("utf-8", "surrogateescape") for name, data in sorted(files.items())}
        self._write(GOOD, json.dumps(content))

    def accepted(self) -> str:
        """Return the accepted hash with its time: accepting the same one again is a new decision."""
        return (self._read(ACCEPTED) or "").strip()

    def accept(self, digest: str, at: float) -> None:
        self._write(ACCEPTED, f"{digest} {at:.3f}\n")

    def spend(self, accepted: str) -> None:
        """Remove an acceptance, unless a person has accepted again meanwhile."""
        if accepted and self.accepted() == accepted:
            self._unlink(ACCEPTED)

    def drop(self) -> None:
        """Drop an outdated copy: starting from it, a new pod would end the jobs of newer partitions."""
        self._unlink(GOOD)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()

    def _read(self, name: str) -> str | None:
        """Read a file of root's, never a link: the Slurm user also writes to the volume."""
        try:
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_mode & 0o170000 != 0o100000 or status.st_uid != os.geteuid() or status.st_size > HOLDS:
                return None
            with contextlib.suppress(OSError, UnicodeDecodeError):
                return file.read().decode()
        return None

    def _write(self, name: str, text: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.directory.chmod(0o700)
        except OSError as error:
            raise PrepareError(f"keep {self.directory / name}", error.strerror or str(error)) from error
        write(self.directory / name, text.encode(), mode=0o600)


def digest(files: Mapping[str, bytes]) -> str:
    """Return the hash that a person confirms: it stands for exactly these files."""
    from hashlib import sha256

    total = sha256()
    for name, data in sorted(files.items()):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:DIGITS]
