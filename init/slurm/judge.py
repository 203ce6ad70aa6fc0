"""Evaluation of a new slurm.conf against the running cluster, and the saved result for the mounted one.

slurmctld is asked only if something is removed that a job may need; pure additions are evaluated without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ground.files import read_plain
from init.errors import InitError
from init.pod.pod import write
from init.slurm.change import Effect, effect, has_less_room, hidden_lists, missing_plugin
from init.slurm.change import ignored as ignored_by
from init.slurm.change import impossible as cannot_be
from init.slurm.conf import Configuration, read
from init.slurm.daemon import Slurmctld
from init.slurm.files import CANDIDATE, SlurmFiles

SAID = Path("/run/minivm/slurm-config.json")
LARGEST_STATE = 1 << 30  # bytes, enough for 200,000 jobs
LONGEST_NAME = 4096
LIVE, REFUSED, PENDING = "live", "refused", "pending"


class SlurmConfigError(InitError):
    """A configuration is missing or not accepted."""


@dataclass(frozen=True, slots=True)
class SavedJudgement:
    """The saved result for a set of files, by their hash."""

    hash: str
    state: str
    why: str = ""


def weigh(files: SlurmFiles, daemon: Slurmctld, candidate: Mapping[str, bytes]) -> Effect:
    """Return changes and losses. A file that is no longer mounted stays installed."""
    old = files.installed()
    new = {**old, **candidate}
    first = effect(old, new, None)
    if not first.losses:
        return first
    jobs = daemon.jobs()
    if jobs is None:
        return first
    running = read(old)
    after = read(new)
    goes = running.partitions.keys() - after.partitions.keys()
    state = _saved(running, "job_state", LARGEST_STATE) if goes else b""
    hidden = hidden_lists(state, running.partitions, [job.partitions for job in jobs])
    return effect(old, new, jobs, hidden, daemon.known_jobs() if has_less_room(running, after) else None)


def impossible(files: SlurmFiles, candidate: Mapping[str, bytes]) -> str:
    """Return why slurmctld would refuse it, if that is known beforehand, else ""."""
    new = read({**files.installed(), **candidate})
    saved = _saved(new, "clustername", LONGEST_NAME).decode(errors="replace")
    errors = (cannot_be(new, saved.partition("|")[0].strip().lower()), missing_plugin(new, plugins()))  # NAME|NUMBER
    return "; ".join(filter(None, errors))


def objections(files: SlurmFiles, daemon: Slurmctld, candidate: Mapping[str, bytes], tried: Path = CANDIDATE) -> str:
    """Return every known error of a candidate, which a Slurm client reads below `tried`, or ""."""
    errors = (daemon.objects_to(files.candidate(candidate, tried)), impossible(files, candidate))
    return "; ".join(filter(None, errors))


def ignored(candidate: Mapping[str, bytes]) -> list[str]:
    """List what this image's Slurm would ignore without a word."""
    paths = [Path("/usr/sbin/slurmctld"), *sorted(Path("/usr/lib").glob("*/slurm*/*.so"))]
    return ignored_by(read(candidate), b"".join(data for path in paths if (data := _bytes(path))))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def plugins() -> frozenset[str]:
    """Return the names of this image's plug-ins of Slurm, without `.so`."""
    return frozenset(path.stem for path in Path("/usr/lib").glob("*/slurm*/*_*.so"))


def _saved(configuration: Configuration, name: str, most: int) -> bytes:
    """Read a file of slurmctld's state, to which its user may have written anything; empty if there is none."""
    directory = configuration.value("statesavelocation")
    if not directory:
        return b""
    path = Path(directory, name)
    try:
        return read_plain(path, min(path.lstat().st_size, most)) or b""
    except OSError:
        return b""


def save_said(said: SavedJudgement, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(asdict(said)).encode(), mode=0o600)


def load_said(path: Path = SAID) -> SavedJudgement | None:
    try:
        data = json.loads(path.read_text())
        return SavedJudgement(str(data["hash"]), str(data["state"]), str(data["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
