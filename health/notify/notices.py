"""Records that slurmctld's MailProg keeps, parsed: every text in them is a user's. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.jobs.model import safe

# An address that goes into an SMTP command and a header as it is: no quotes, no options, no spaces,
# no `%` and `!` by which a relay would send it on, no `?` of encoded words.
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9.#$&'*+/=^_`{|}~-]{0,63}@[A-Za-z0-9][A-Za-z0-9.-]{0,189}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
MOST_RECIPIENTS = 5
LONGEST = 16 * 1024
SUMMARY = "Slurm Array Summary "  # of an array as a whole, whose variables are those of its last task
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
    """Parse a record; None for one that is none."""
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
    least, most = (safe(fields.get(f"JOB_EXIT_CODE_{end}", ""), 12) for end in ("MIN", "MAX"))
    at, _, _ = name.partition("-")
    return JobNotice(
        name,
        fields.get("TO", ""),
        safe(fields["JOB_USER"], 64),
        job,
        safe(fields.get("JOB_NAME", ""), 80),
        safe(fields.get("JOB_MAIL_TYPE", ""), 60) or "Changed",
        "" if is_array else safe(fields.get("JOB_STATE", ""), 40),
        "" if is_array else safe(fields.get("JOB_RUN_TIME", ""), 40),
        f"{least} to {most}" if is_array and least != most else most,
        is_array,
        int(at) / 1e9 if _is_number(at, 20) else 0.0,
    )


def recipients(to: str, domain: str, domains: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the addresses of `--mail-user`, whose bare names get the domain.

    Empty if one of them is no address, or of neither the domain nor one of the other domains; "*" is any.
    """
    found = []
    allowed = {name.lower() for name in (domain, *domains)}
    for part in to.split(","):
        address = f"{part}@{domain}" if NAME.fullmatch(part) else part
        if not ADDRESS.fullmatch(address) or ".." in address:
            return ()
        if "*" not in allowed and address.rpartition("@")[2].lower() not in allowed:
            return ()
        found.append(address)
    return tuple(dict.fromkeys(found)) if len(found) <= MOST_RECIPIENTS else ()


def _is_number(text: str, most: int = 10) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= most
