"""Ownership of build containers, also after an interrupted build: each has its build's mark as a label.

A mark is a file that its build keeps locked while it lives. A mark that is not locked belongs to a dead build, and the
next build of the repository removes its containers (`Engine.clear`). A mark of an engine that is no longer used, or
that names no engine, is removed after a month.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

from ground.files import locked

LABEL = "io.minivm.build"
LONGEST = 4096
KEPT_S = 30 * 86400.0  # of what is never judged; no build takes so long


def engine_of(info: Mapping[str, Any], address: str) -> str:
    """Identify the engine by its own id: machines that share a tree have one each at the same address.

    An engine without an id is identified by its address, with the machine's name for a socket.
    """
    if own := info.get("ID"):
        return str(own)
    return f"{os.uname().nodename} {address}" if address.startswith("unix://") else address


class Marks:
    def __init__(self, directory: Path, engine: str) -> None:
        """Use `directory` for the marks of the engine `engine`; marks of other engines are left alone."""
        self.directory, self.engine = directory, engine
        self._one = Lock()
        self._own, self._fd = "", -1

    def own(self) -> str:
        """Return this build's mark, made at its first container; the kernel unlocks it when the process ends."""
        with self._one:
            if not self._own:
                self.directory.mkdir(parents=True, exist_ok=True)
                name = uuid4().hex
                fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    held = locked(fd, within=1.0)
                except OSError:  # a file system without locks
                    held = False
                # What says no engine is never judged: what cannot be locked, and what is not locked yet.
                if held:
                    os.write(fd, self.engine.encode())
                self._own, self._fd = name, fd
            return self._own

    def release(self) -> None:
        """Remove this build's mark: it has no container left."""
        with self._one:
            if self._own:
                (self.directory / self._own).unlink(missing_ok=True)
                os.close(self._fd)
                self._own = ""

    def dead(self) -> Iterator[Path]:
        """Yield the marks of dead builds, each locked until the next one is requested."""
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # another build has dealt with it
                continue
            try:
                if self._is_dead(fd):
                    yield path
                elif self._is_old(fd):
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)

    @staticmethod
    def _is_old(fd: int) -> bool:
        """Tell whether the mark's build is dead and its engine has not been used for a month."""
        if time.time() - os.fstat(fd).st_mtime < KEPT_S:
            return False
        try:
            return locked(fd)
        except OSError:
            return True

    def _is_dead(self, fd: int) -> bool:
        try:
            return locked(fd) and os.read(fd, LONGEST) == self.engine.encode()
        except OSError:
            return False
