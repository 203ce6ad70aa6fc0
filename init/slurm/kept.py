"""The last configuration that slurmctld ran with, kept where its state is: the next pod starts from it.

Beside it: the hash of one that somebody has accepted whatever it costs. Read in a step of the boot, so it stays light.
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
HOLDS = 16 << 20  # bytes: nothing that Slurm reads comes near


class Kept:
    def __init__(self, pod: Pod) -> None:
        self.directory = pod.path(DIRECTORY)

    def good(self) -> dict[str, bytes] | None:
        """Name -> content; None where there is none, or nothing that can be read."""
        text = self._read(GOOD)
        if text is None:
            return None
        try:
            found = read_json(text)
        except ValueError:
            return None
        if not isinstance(found, dict) or not all(isinstance(item, str) for pair in found.items() for item in pair):
            return None
        return {str(name): str(content).encode("utf-8", "surrogateescape") for name, content in found.items()}

    def keep(self, files: Mapping[str, bytes]) -> None:
        import json

        content = {name: data.decode("utf-8", "surrogateescape") for name, data in sorted(files.items())}
        self._write(GOOD, json.dumps(content))

    def accepted(self) -> str:
        """The hash, and when: the same one accepted again is another word."""
        return (self._read(ACCEPTED) or "").strip()

    def accept(self, digest: str, at: float) -> None:
        self._write(ACCEPTED, f"{digest} {at:.3f}\n")

    def spend(self, accepted: str) -> None:
        """Unless somebody has said another word meanwhile."""
        if accepted and self.accepted() == accepted:
            self._unlink(ACCEPTED)

    def drop(self) -> None:
        """Older than what runs, it knows less: of a partition since then a new pod would end the jobs."""
        self._unlink(GOOD)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()

    def _read(self, name: str) -> str | None:
        """A file of root's, and no link: the volume is also the Slurm user's."""
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
    """What a person confirms: these files and no others."""
    from hashlib import sha256

    total = sha256()
    for name, data in sorted(files.items()):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:DIGITS]
