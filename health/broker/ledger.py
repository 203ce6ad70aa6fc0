"""What each GPU has done before: incidents by UUID on a path of the host, so that they outlive pods.

`minivm health ledger --forgive` changes the same files, in another process: whoever changes one holds the directory's
lock from its reading to its writing, so that no incident and no forgiveness is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LEDGER = "/var/lib/minivm/ledger"
# The name is shared with health/ledger.py, which this package does not import.
LOCK = ".lock"
EVENTS_KEPT = 100


class Ledger:
    """One file a GPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, uuid: str, event: Mapping[str, object], *, serial: str = "", model: str = "") -> None:
        with self._changing(uuid) as data:
            _add(data, uuid, event, serial, model)

    def enter(
        self, uuid: str, event: Mapping[str, object], since: float, most: int, *, serial: str = "", model: str = ""
    ) -> int:
        """Adds an incident and says how many there are since then; from `most` on the GPU is marked an offender."""
        with self._changing(uuid) as data:
            _add(data, uuid, event, serial, model)
            count = _incidents(data, since)
            data["offender"] = count >= most
            return count

    def incidents(self, uuid: str, since: float) -> int:
        """How many since then, and since somebody forgave what was before."""
        return _incidents(self._read(uuid), since)

    @contextlib.contextmanager
    def _changing(self, uuid: str) -> Iterator[dict[str, Any]]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = self._read(uuid)
            before = json.dumps(data)
            yield data
            if json.dumps(data) != before:
                self._write(uuid, data)
        finally:
            os.close(lock)

    def _path(self, uuid: str) -> Path:
        # A subject comes from a tool's output: it must not name another directory.
        return self.directory / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)[:80]}.json"

    def _read(self, uuid: str) -> dict[str, Any]:
        """What can be read of it: the host's disk may have damaged it, and the broker must live on."""
        try:
            data = json.loads(self._path(uuid).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or not isinstance(data.get("events", []), list):
            return {}
        if not _is_time(data.get("forgiven_at", 0.0)):
            del data["forgiven_at"]
        data["events"] = [
            event for event in data.get("events", []) if isinstance(event, dict) and _is_time(event.get("at"))
        ]
        return data

    def _write(self, uuid: str, data: Mapping[str, object]) -> None:
        path = self._path(uuid)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _add(data: dict[str, Any], uuid: str, event: Mapping[str, object], serial: str, model: str) -> None:
    last = data.get("events", [])[-1:]
    if last and event.get("evidence") and last[0].get("evidence") == event["evidence"]:
        # The same incident, seen again by a broker that was started anew.
        return
    data.update(uuid=uuid, serial=serial or data.get("serial", ""), model=model or data.get("model", ""))
    data["events"] = [*data.get("events", []), dict(event)][-EVENTS_KEPT:]


def _incidents(data: Mapping[str, Any], since: float) -> int:
    start = max(since, float(data.get("forgiven_at", 0.0)))
    return sum(1 for event in data.get("events", []) if float(event.get("at", 0.0)) > start)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
