"""slurmctld's saved state: its place, and the head of job_state. Pure but for the image's own release."""

from __future__ import annotations

from init.pod import release as slurm
from init.pod.release import WORD, Release

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.pod.pod import Pod

STATE = "/var/spool/slurmctld"
CONFIGURATION = "/etc/slurm/slurm.conf"
BACKUPS = "/var/lib/minivm/backups"  # copies of it (init.state)
JOURNAL = ".minivm-restore.json"  # in the state, while a restore moves files
ACCEPTED = ".minivm-accepted-loss"  # in the state, once an operator accepted to start without its jobs
JOBS = "job_state"
NEW, OLD = ".new", ".old"
# The head of job_state: the word with its length, the release's number, the time, the next job's number, another time.
HEAD = 4 + len(WORD)
NEXT = HEAD + 2 + 8
WHOLE_HEAD = NEXT + 4 + 8
# MaxJobId's default: larger numbers in the accounting database are those of a federation.
LARGEST = 0x03FF0000


def known(pod: Pod) -> Release | None:
    """Return the image's Slurm release; None if the image does not say."""
    text = pod.text(slurm.FILE)
    return slurm.of_json(text) if text else None


def has_head(head: bytes) -> bool:
    """Tell if a file begins as each of slurmctld's job_state does."""
    return head[:HEAD] == len(WORD).to_bytes(4, "big") + WORD and len(head) >= WHOLE_HEAD


def next_job(head: bytes, release: Release) -> int | None:
    """Return the next job's number from the head of job_state; None if this release does not read the file."""
    begins = has_head(head) and len(head) == WHOLE_HEAD
    if not begins or not release.reads <= head[HEAD] <= release.protocol or head[HEAD + 1]:
        return None
    return int.from_bytes(head[NEXT : NEXT + 4], "big")


def head_of(release: Release, following: int, now: float) -> bytes:
    """Return a job_state without jobs."""
    head = len(WORD).to_bytes(4, "big") + WORD + bytes([release.protocol, 0]) + int(now).to_bytes(8, "big")
    return head + following.to_bytes(4, "big") + bytes(8)
