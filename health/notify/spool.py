"""Files of notifications: records of slurmctld's MailProg, messages that wait for a channel, and counts.

new/         records of the MailProg, which slurmctld's user writes; `lost` has a byte for each that found no room
mail/        messages for the relay, and webhook/ for the webhook: removed once the server took them
limits.json  what each user had this hour

Killed between two steps, the service sends a message twice, and loses none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ground.files import read_json, read_plain, write_json
from health.notify.notices import LONGEST

DIRECTORY = Path("/var/lib/minivm/notify")
LOST = "lost"
MOST_QUEUED = 2000
STALE = 600.0


class NotifySpool:
    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.directory = directory
        self.new = directory / "new"

    def records(self, now: float) -> list[str]:
        """Return the names of finished records, oldest first; remove those that a killed MailProg left unfinished."""
        names = _names(self.new)
        old = f".{int((now - STALE) * 1e9):020d}"
        self.remove_records([name for name in names if name[:1] == "." and name < old])
        return sorted(name for name in names if name[:1].isdigit())

    def read(self, name: str) -> bytes:
        return read_plain(self.new / name, LONGEST) or b""

    def remove_records(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                (self.new / name).unlink()

    def take_lost(self) -> int:
        """Return how many records found no room since the last call."""
        path = self.new / LOST
        try:
            number = path.lstat().st_size
            path.unlink()
        except OSError:
            return 0
        return number

    def queue(self, channel: str) -> list[str]:
        return sorted(name for name in _names(self.directory / channel) if name.endswith(".json"))

    def has_room(self, channel: str) -> bool:
        return len(_names(self.directory / channel)) < MOST_QUEUED

    def put(self, channel: str, name: str, message: Mapping[str, Any]) -> None:
        (self.directory / channel).mkdir(mode=0o700, exist_ok=True)
        write_json(self.directory / channel / f"{name}.json", message, 0o600)

    def get(self, channel: str, name: str) -> Mapping[str, Any]:
        return read_json(self.directory / channel / name)

    def done(self, channel: str, name: str) -> None:
        with suppress(FileNotFoundError):
            (self.directory / channel / name).unlink()

    def limits(self) -> Mapping[str, Any]:
        return read_json(self.directory / "limits.json")

    def save_limits(self, data: Mapping[str, Any]) -> None:
        text = json.dumps(data, sort_keys=True)
        if text != json.dumps(self.limits(), sort_keys=True):
            write_json(self.directory / "limits.json", data, 0o600)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 (thousands of names, no paths)
    except FileNotFoundError:
        return []
