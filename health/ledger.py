"""What each GPU of this host has done, over pods and boots: the broker writes the ledger, and here it is read."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gitsync.errors import GitsyncError
from health.verdict import write_json

LEDGER = "/var/lib/minivm/ledger"
LOCK = ".lock"
SHOWN = 5


def directory() -> Path:
    return Path(os.environ.get("MINIVM_LEDGER", LEDGER))


def forgive(uuid: str) -> None:
    """Incidents up to now no longer count."""
    path = directory() / f"{uuid}.json"
    if path not in _files():
        raise GitsyncError("forgive a GPU", f"{uuid} is not in the ledger", file=directory())
    try:
        # The broker enters incidents into the same file: it takes this lock too (health/broker/ledger.py).
        lock = os.open(directory() / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise GitsyncError("lock the ledger", error.strerror or str(error), file=directory() / LOCK) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_json(path, {**_read(path), "forgiven_at": time.time(), "offender": False}, 0o600)
    finally:
        os.close(lock)


def show(*, as_json: bool) -> bool:
    """False where a file could not be read: it is told, and the others are shown."""
    books, whole = [], True
    for path in _files():
        try:
            books.append(_read(path))
        except GitsyncError as error:
            print(f"error: {error}", file=sys.stderr)
            whole = False
    if as_json:
        print(json.dumps(books, indent=1))
    else:
        for book in books:
            print("\n".join(_lines(book)))
    return whole


def _lines(book: dict[str, Any]) -> list[str]:
    events = book.get("events", [])
    mark = "  repeat offender" if book.get("offender") else ""
    head = f"{book.get('uuid')}  {book.get('model')}  serial {book.get('serial') or '-'}  {len(events)} incidents{mark}"
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(event["at"])) for event in events[-SHOWN:]]
    told = zip(days, events[-SHOWN:], strict=True)
    return [head, *(f"  {day}  {event['check']}: {event['reason']}" for day, event in told)]


def _files() -> list[Path]:
    return sorted(directory().glob("[!.]*.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        book = json.loads(path.read_bytes())
    except OSError as error:
        raise GitsyncError("read the ledger", error.strerror or str(error), file=path) from error
    except ValueError as error:
        raise GitsyncError("read the ledger", f"not JSON: {error}", file=path) from error
    if not isinstance(book, dict):
        raise GitsyncError("read the ledger", "wanted a mapping", file=path)
    events = book.get("events", [])
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise GitsyncError(
            "read the ledger", "wanted a list of incidents: at, check, reason", file=path, field="events"
        )
    return book


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or not {"check", "reason"} <= event.keys():
        return False
    return isinstance(event.get("at"), int | float) and 0 <= event["at"] < 1e11
