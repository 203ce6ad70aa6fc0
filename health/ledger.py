"""Incident history of each GPU, by UUID, on a path of the host, so that it outlives pods.

The broker enters incidents and a person forgives them, in two processes. Each holds the directory's lock from reading
to writing, so that no incident and no forgiveness is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gitsync.errors import GitsyncError
from ground.files import read_json, write_json
from health.verdict import read_mapping

LOCK = ".lock"
EVENTS_KEPT = 100
LATEST = 1e11  # seconds since 1970 that a calendar can show


class Ledger:
    """A directory with one file per GPU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def enter(
        self, uuid: str, event: Mapping[str, object], since: float, most: int, *, serial: str = "", model: str = ""
    ) -> int:
        """Add an incident and return the count since `since`; from `most` on, mark the GPU an offender."""
        path = self._path(uuid)
        with self._hold_lock():
            before = _read_legible(path)
            after = _add_event(before, uuid, event, serial, model)
            count = _incidents(after, since)
            after["offender"] = count >= most
            if after != before:
                write_json(path, after, 0o600)
        return count

    def forgive(self, uuid: str, now: float) -> None:
        """Stop counting incidents up to now."""
        path = self._path(uuid)
        if path not in self.files():
            raise GitsyncError("forgive a GPU", f"{uuid} is not in the ledger", file=self.directory)
        try:
            with self._hold_lock():
                write_json(path, {**read_book(path), "forgiven_at": now, "offender": False}, 0o600)
        except OSError as error:
            raise GitsyncError("change the ledger", error.strerror or str(error), file=self.directory) from error

    def incidents(self, uuid: str, since: float) -> int:
        """Count the incidents since `since` and since the last forgiveness."""
        return _incidents(_read_legible(self._path(uuid)), since)

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("[!.]*.json"))

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _path(self, uuid: str) -> Path:
        # A subject comes from a tool's output: it must not name another directory.
        return self.directory / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)[:80]}.json"


def read_book(path: Path) -> dict[str, Any]:
    """Read a GPU's file for a person; raise an error if it is damaged, and leave it as it is."""
    book = read_mapping(path, "read the ledger")
    events = book.get("events", [])
    if not isinstance(events, list) or not all(map(_can_be_shown, events)):
        expected = "wanted a list of incidents with at, check, reason"
        raise GitsyncError("read the ledger", expected, file=path, field="events")
    return book


def _read_legible(path: Path) -> dict[str, Any]:
    """Read what is legible for the broker, which must survive a file damaged by the host's disk."""
    data = dict(read_json(path))
    if not isinstance(data.get("events", []), list):
        return {}
    if not _is_time(data.get("forgiven_at", 0.0)):
        del data["forgiven_at"]
    data["events"] = [
        event for event in data.get("events", []) if isinstance(event, dict) and _is_time(event.get("at"))
    ]
    return data


def _add_event(
    book: Mapping[str, Any], uuid: str, event: Mapping[str, object], serial: str, model: str
) -> dict[str, Any]:
    last = book.get("events", [])[-1:]
    if last and event.get("evidence") and last[0].get("evidence") == event["evidence"]:
        # A restarted broker sees the same incident again.
        return dict(book)
    identity = {"uuid": uuid, "serial": serial or book.get("serial", ""), "model": model or book.get("model", "")}
    return {**book, **identity, "events": [*book.get("events", []), dict(event)][-EVENTS_KEPT:]}


def _incidents(book: Mapping[str, Any], since: float) -> int:
    start = max(since, float(book.get("forgiven_at", 0.0)))
    return sum(1 for event in book.get("events", []) if float(event.get("at", 0.0)) > start)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _can_be_shown(event: object) -> bool:
    if not isinstance(event, dict) or not {"check", "reason"} <= event.keys():
        return False
    return _is_time(event.get("at")) and 0 <= event["at"] < LATEST
