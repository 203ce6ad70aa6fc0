"""What each GPU has done before: incidents by UUID on a path of the host, so that they outlive pods."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEDGER = "/var/lib/minivm/ledger"
EVENTS_KEPT = 100


class Ledger:
    """One file a GPU, one writer a node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, uuid: str, event: Mapping[str, object], *, serial: str = "", model: str = "") -> None:
        data = self._read(uuid)
        last = data.get("events", [])[-1:]
        if last and event.get("evidence") and last[0].get("evidence") == event["evidence"]:
            # The same incident, seen again by a broker that was started anew.
            return
        data.update(uuid=uuid, serial=serial or data.get("serial", ""), model=model or data.get("model", ""))
        data["events"] = [*data.get("events", []), dict(event)][-EVENTS_KEPT:]
        self._write(uuid, data)

    def incidents(self, uuid: str, since: float) -> int:
        """How many since then, and since somebody forgave what was before."""
        data = self._read(uuid)
        start = max(since, float(data.get("forgiven_at", 0.0)))
        return sum(1 for event in data.get("events", []) if float(event.get("at", 0.0)) > start)

    def mark(self, uuid: str, offender: bool) -> None:
        data = self._read(uuid)
        if data and bool(data.get("offender")) is not offender:
            self._write(uuid, {**data, "offender": offender})

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
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(uuid)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
