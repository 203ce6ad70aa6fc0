"""Records of slurmctld's MailProg, and the spool of notifications that is kept in files.

slurmctld runs a small MailProg for each event; it writes one record into the spool and ends. The service `notify`
(`health.notify.service`) parses the record (`parse`: its texts come from users), checks whom it may reach
(`recipients`), and puts messages into the queues of the channels. The spool's files:

    new/         records of the MailProg, which slurmctld's user writes; `lost` has a byte for each that did not fit
    mail/        messages for the relay
    webhook/     messages for the webhook
    users/       the webhook of each user that has one, which slurmctld's user writes
    own/         messages for these
    limits.json  how many messages each user got this hour

A message is removed once the server took it. A service that is killed between two steps may send a message twice; it
loses none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground.files import read_json, read_plain, write_json
from health.jobs.model import safe

# An address that goes into an SMTP command and a header as it is: no quotes, no options, no spaces,
# no `%` and `!` by which a relay would send it on, no `?` of encoded words.
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9.#$&'*+/=^_`{|}~-]{0,63}@[A-Za-z0-9][A-Za-z0-9.-]{0,189}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
MOST_RECIPIENTS = 5
LONGEST = 16 * 1024
SUMMARY = "Slurm Array Summary "  # subject of a whole array; its variables are those of the array's last task
ENDS = ("Ended", "Failed", "Invalid dependency", "Reached time limit")


@dataclass(frozen=True, slots=True)
class JobNotice:
    """One event of a job, as slurmctld hands it to the MailProg."""

    id: str  # the record's name
    to: str
    user: str
    job: str  # 12, or 12_3 for a task of an array
    name: str
    event: str  # Began, Ended, Failed, Requeued, Reached time limit
    state: str = ""
    run_time: str = ""
    exit_codes: str = ""  # 1, or 0 to 3 of an array's tasks
    is_array: bool = False  # all of its tasks at once
    at: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.event.startswith(ENDS)


def parse(name: str, data: bytes) -> JobNotice | None:
    """Parse a record; return None if it is malformed."""
    fields: dict[str, str] = {}
    for part in data[:LONGEST].split(b"\0"):
        key, equals, text = part.decode(errors="replace").partition("=")
        if equals:
            fields[key.removeprefix("SLURM_")] = text
    job = fields.get("JOB_ID", "")
    array, task = fields.get("ARRAY_JOB_ID", ""), fields.get("ARRAY_TASK_ID", "")
    if not _is_number(job) or not fields.get("JOB_USER"):
        return None
    is_array = fields.get("SUBJECT", "").startswith(SUMMARY)
    if _is_number(array):
        job = f"{array}_{task}" if _is_number(task) and not is_array else array
    lowest, highest = (safe(fields.get(f"JOB_EXIT_CODE_{end}", ""), 12) for end in ("MIN", "MAX"))
    nanoseconds, _, _ = name.partition("-")
    return JobNotice(
        name,
        fields.get("TO", ""),
        safe(fields["JOB_USER"], 64),
        job,
        safe(fields.get("JOB_NAME", ""), 80),
        safe(fields.get("JOB_MAIL_TYPE", ""), 60) or "Changed",
        "" if is_array else safe(fields.get("JOB_STATE", ""), 40),
        "" if is_array else safe(fields.get("JOB_RUN_TIME", ""), 40),
        f"{lowest} to {highest}" if is_array and lowest != highest else highest,
        is_array,
        int(nanoseconds) / 1e9 if _is_number(nanoseconds, 20) else 0.0,
    )


def recipients(to: str, domain: str, domains: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the addresses in `--mail-user`; a bare name gets `domain`.

    Return () if an entry is no address, or its domain is neither `domain` nor in `domains`; "*" there allows any.
    """
    addresses = []
    allowed = {name.lower() for name in (domain, *domains)}
    for part in to.split(","):
        address = f"{part}@{domain}" if NAME.fullmatch(part) else part
        if not ADDRESS.fullmatch(address) or ".." in address:
            return ()
        if "*" not in allowed and address.rpartition("@")[2].lower() not in allowed:
            return ()
        addresses.append(address)
    return tuple(dict.fromkeys(addresses)) if len(addresses) <= MOST_RECIPIENTS else ()


def _is_number(text: str, max_digits: int = 10) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= max_digits


# The spool.

DIRECTORY = Path("/var/lib/minivm/notify")
USERS = DIRECTORY / "users"
LOST = "lost"
MOST_QUEUED = 2000
STALE_S = 600.0  # age of an unfinished record whose MailProg must be gone


class NotifySpool:
    """The spool's files."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.directory = directory
        self.new = directory / "new"
        self.users = directory / "users"

    def records(self, now: float) -> list[str]:
        """Return the names of finished records, oldest first; remove those that a killed MailProg left unfinished."""
        names = _names(self.new)
        oldest_unfinished = f".{int((now - STALE_S) * 1e9):020d}"
        self.remove_records([name for name in names if name[:1] == "." and name < oldest_unfinished])
        return sorted(name for name in names if name[:1].isdigit())

    def read(self, name: str) -> bytes:
        return read_plain(self.new / name, LONGEST) or b""

    def remove_records(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                (self.new / name).unlink()

    def take_lost(self) -> int:
        """Return how many records did not fit since the last call."""
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

    def remove(self, channel: str, name: str) -> None:
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
