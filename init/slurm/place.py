"""The state directory and the name of this pod's slurmctld, and the slurm.conf that this pod alone has.

A controller that has always been alone uses the mounted slurm.conf unchanged. A boot step reads this: imports stay few.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ground.files import read_json
from init.errors import ConfigError
from init.fields import number
from init.pod import release as slurm
from init.pod.pod import MOUNTS, Pod
from init.pod.release import WORD, Release
from init.slurm.conf import setting

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


def find_state_directory(pod: Pod) -> Path:
    """Return the directory of slurmctld's saved state, which the installed slurm.conf names."""
    return pod.path(setting(pod.text(CONFIGURATION) or "", "StateSaveLocation") or STATE)


def list_submitted_jobs(state: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each job that has a script, and the job's directory below the state.

    slurmctld writes the script before it answers `sbatch`, and the job's record up to 6 s later.
    """
    for digit in range(10):
        with contextlib.suppress(OSError):
            for name in os.listdir(state / f"hash.{digit}"):  # noqa: PTH208 - names alone, of up to 100,000 jobs
                if name.startswith("job.") and (job := number(name.removeprefix("job."))):
                    yield job, f"hash.{digit}/{name}"


def read_release(pod: Pod) -> Release | None:
    """Return the image's Slurm release; None if the image does not say."""
    text = pod.text(slurm.FILE)
    return slurm.parse_release(text) if text else None


def has_head(head: bytes) -> bool:
    """Tell if a file begins as each of slurmctld's job_state does."""
    return head[:HEAD] == len(WORD).to_bytes(4, "big") + WORD and len(head) >= WHOLE_HEAD


def read_next_job(head: bytes, release: Release) -> int | None:
    """Return the next job's number from the head of job_state; None if this release does not read the file."""
    begins = has_head(head) and len(head) == WHOLE_HEAD
    if not begins or not release.reads <= head[HEAD] <= release.protocol or head[HEAD + 1]:
        return None
    return int.from_bytes(head[NEXT : NEXT + 4], "big")


def make_head(release: Release, following: int, now: float) -> bytes:
    """Return a job_state without jobs."""
    head = len(WORD).to_bytes(4, "big") + WORD + bytes([release.protocol, 0]) + int(now).to_bytes(8, "big")
    return head + following.to_bytes(4, "big") + bytes(8)


MOUNTED = f"{MOUNTS}/config/slurm/slurm.conf"
LEASE = "lease"  # the directory of the lease, beside those of the terms
# Written by the service `lease` as the user slurm: {"term": N}.
HELD = "/run/slurm/lease.json"
CONTROLLERS = "MINIVM_CONTROLLERS"
NO_HASH = "NO_CONF_HASH"
_HOST = re.compile(rb"(?im)^[ \t]*SlurmctldHost[ \t]*=[ \t]*([^\s#]+)[^\n]*$")
_STATE = re.compile(rb"(?im)^[ \t]*StateSaveLocation[ \t]*=[^\n]*$")


def base(pod: Pod) -> Path:
    """Return the directory that has the terms."""
    return pod.path(setting(pod.text(MOUNTED) or "", "StateSaveLocation") or STATE)


def several(pod: Pod) -> bool:
    """Tell if this controller is one of several."""
    return (number(pod.setting(CONTROLLERS, "1")) or 1) > 1


def read_term(pod: Pod) -> int:
    """Return the term that this pod has; 0 for a controller that has always been alone."""
    term = read_json(pod.path(HELD)).get("term")
    return term if isinstance(term, int) else 0


def find_term_directory(parent: Path, term: int) -> Path:
    return parent / f"term-{term}"


def place_files(pod: Pod, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with the host and the state of this pod's term; unchanged without a term."""
    term = read_term(pod)
    return fill_in_term(files, base(pod), term, os.uname().nodename.partition(".")[0]) if term else dict(files)


def fill_in_term(files: Mapping[str, bytes], parent: Path, term: int, host: str) -> dict[str, bytes]:
    """Return the files with this pod's own host and state in slurm.conf, for the holder of a term."""
    text = files.get("slurm.conf")
    if not term or text is None:
        return dict(files)
    hosts = _HOST.findall(text)
    if len(hosts) != 1:
        raise ConfigError(
            "start one of several controllers",
            f"it has {len(hosts)} lines SlurmctldHost",
            file="slurm.conf",
            field="SlurmctldHost",
            hint="write one: NAME(ADDRESS), with the address that moves to the active controller",
        )
    name, _, address = hosts[0].decode(errors="replace").partition("(")
    line = f"SlurmctldHost={host}({address.rstrip(')') or name})".encode()
    text = _HOST.sub(lambda _: line, text)
    state = f"StateSaveLocation={find_term_directory(parent, term)}".encode()
    text = _STATE.sub(lambda _: state, text) if _STATE.search(text) else text.rstrip(b"\n") + b"\n" + state + b"\n"
    # The nodes have the file of the controller that they asked last: slurmctld would report each as a wrong one.
    flags = setting(text.decode(errors="replace"), "DebugFlags")
    if NO_HASH.lower() not in flags.lower().split(","):
        text = text.rstrip(b"\n") + f"\nDebugFlags={','.join(filter(None, (flags, NO_HASH)))}\n".encode()
    return {**files, "slurm.conf": text}
