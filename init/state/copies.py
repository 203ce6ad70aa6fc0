"""A copy of a pod's state: a directory with a manifest, which names each file by its SHA-256.

A controller copies slurmctld's state and the embedded database; the accounting pod has the database alone.

A copy is published by one rename, so a directory without a leading dot is whole as it was written; `verify` finds what
has changed since. `init.state.save` makes copies, `init.state.prove` tests them in a throw-away slurmctld, and
`init.state.restore` puts one back. This module has what the three share: the manifest, the proof's result, the list of
the jobs that a copy must hold (`compare_listings`), and the summary for `minivm status` and the metrics.

Only root may write to copies: a copy becomes the state from which slurmctld starts jobs as any user.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ground.files import read_plain, write_whole
from ground.metrics import family
from init.errors import InitError
from init.lean import record
from init.view.status import duration

FORMAT = 1
MANIFEST, PROOF = "manifest.json", "proof.json"
STATE_TAR, ACCOUNTING, JOBS_LIST, CONFIG = "state.tar", "accounting.sql.gz", "jobs.json", "config.json"
LARGEST_MANIFEST = 1 << 20
CHUNK = 1 << 20
NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z(?:-[0-9]{1,3})?")
DIGEST = re.compile(r"[0-9a-f]{64}")


class CopyError(InitError):
    """A copy that cannot be made, read, or restored."""


@record(frozen=True, slots=True)
class Manifest:
    name: str
    time: float
    release: str  # the Slurm of the image, such as 24.11; "" if unknown
    protocol: int  # the number of that Slurm's state; 0 if unknown
    cluster: str
    jobs: tuple[tuple[str, int], ...]  # state -> count, of jobs that did not change around the copy
    listed: bool  # slurmctld listed its jobs
    changing: int  # jobs that changed around the copy
    highest: int  # job number
    accounting: str  # "" if the copy has the database, else why not
    accounted: tuple[int, int]  # rows of the job table before and after the dump
    files: tuple[tuple[str, str], ...]  # name -> SHA-256

    @property
    def unfinished(self) -> int:
        return sum(count for _, count in self.jobs) + self.changing

    @property
    def has_state(self) -> bool:
        """Tell if the copy has slurmctld's state; the accounting pod's copies have records alone."""
        return STATE_TAR in dict(self.files)

    @property
    def has_accounting(self) -> bool:
        return ACCOUNTING in dict(self.files)


@record(frozen=True, slots=True)
class Proof:
    """The result of a restore into a throw-away slurmctld."""

    time: float
    ok: bool
    text: str


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest's text, with a hash of itself."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "time": manifest.time,
        "release": manifest.release,
        "protocol": manifest.protocol,
        "cluster": manifest.cluster,
        "jobs": dict(manifest.jobs),
        "listed": manifest.listed,
        "changing": manifest.changing,
        "highestJob": manifest.highest,
        "accounting": manifest.accounting,
        "accounted": list(manifest.accounted),
        "files": dict(manifest.files),
    }
    return json.dumps({**data, "sha256": _hash_manifest(data)}, indent=2, sort_keys=True) + "\n"


def parse_manifest(name: str, text: str, file: str) -> Manifest:
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("wanted an object")
        version = data.get("format")
        if version != FORMAT:
            raise CopyError(
                f"read the copy {name}",
                f"it has format {version!r}, this minivm reads {FORMAT}",
                file=file,
                hint="use the minivm that made it",
            )
        if _hash_manifest({key: value for key, value in data.items() if key != "sha256"}) != data.get("sha256"):
            raise ValueError("it does not have the SHA-256 that it names")
        return _read_manifest_fields(name, data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CopyError(
            f"read the copy {name}",
            f"its manifest is damaged: {error}",
            file=file,
            hint="take another copy: `minivm state list`",
        ) from error


def _read_manifest_fields(name: str, data: Mapping[str, Any]) -> Manifest:
    files = {str(file): str(digest) for file, digest in data["files"].items()}
    is_complete = CONFIG in files and files.keys() & {STATE_TAR, ACCOUNTING}
    if not is_complete or not files.keys() <= {STATE_TAR, CONFIG, JOBS_LIST, ACCOUNTING}:
        raise ValueError("it names other files than a copy has")
    if not all(DIGEST.fullmatch(digest) for digest in files.values()):
        raise ValueError("a SHA-256 is malformed")
    before, after = data["accounted"]
    return Manifest(
        name=name,
        time=float(data["time"]),
        release=str(data["release"]),
        protocol=int(data["protocol"]),
        cluster=str(data["cluster"]),
        jobs=tuple(sorted((str(state), int(count)) for state, count in data["jobs"].items())),
        listed=data["listed"] is True,
        changing=int(data["changing"]),
        highest=int(data["highestJob"]),
        accounting=str(data["accounting"]),
        accounted=(int(before), int(after)),
        files=tuple(sorted(files.items())),
    )


def _hash_manifest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def load_manifest(directory: Path, name: str) -> Manifest:
    """Read one copy's manifest; its files are not read."""
    if not NAME.fullmatch(name):
        raise CopyError(f"read the copy {name!r}", "no copy has such a name", hint="see `minivm state list`")
    copy = directory / name
    _trust(directory)
    if not copy.is_dir() or copy.is_symlink():
        raise CopyError(f"read the copy {name}", f"{directory} has none of that name", hint="see `minivm state list`")
    _trust(copy)
    data = read_plain(copy / MANIFEST, LARGEST_MANIFEST)
    if data is None:
        raise CopyError(f"read the copy {name}", "it has no manifest", file=str(copy / MANIFEST))
    return parse_manifest(name, data.decode(errors="replace"), str(copy / MANIFEST))


def _trust(directory: Path) -> None:
    """Refuse a directory that another user can write to."""
    try:
        status = directory.lstat()
    except OSError as error:
        raise CopyError("read the copies", error.strerror or str(error), file=str(directory)) from error
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
        problem = f"its owner is user {status.st_uid} and its mode {stat.S_IMODE(status.st_mode):o}"
        raise CopyError("trust the copies", problem, file=str(directory), hint="wanted: root alone may write there")


def list_names(directory: Path) -> list[str]:
    """List copies, newest first, damaged ones too."""
    try:
        entries = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []

    # 20261126T120000Z-10 is newer than 20261126T120000Z-2.
    def key(name: str) -> tuple[str, int]:
        stamp, _, more = name.partition("-")
        return stamp, int(more or 1)

    return sorted((name for name in entries if NAME.fullmatch(name)), key=key, reverse=True)


def load_readable(directory: Path) -> Iterator[Manifest]:
    """Yield the copies whose manifest can be read, newest first."""
    for name in list_names(directory):
        try:
            yield load_manifest(directory, name)
        except CopyError:
            continue


def verify(directory: Path, manifest: Manifest) -> None:
    """Compare each file with its SHA-256; CopyError names the first that differs."""
    for name, expected in manifest.files:
        path = directory / manifest.name / name
        with open_file(path, manifest.name) as file:
            actual = hash_file(file)
        if actual != expected:
            raise CopyError(
                f"take the copy {manifest.name}",
                f"found SHA-256 {actual[:12]}, expected {expected[:12]}",
                file=str(path),
                hint="take another copy: `minivm state list`",
            )


def open_file(path: Path, copy: str) -> Any:
    """Open a file of a copy for reading; refuse anything but a plain file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CopyError(
            f"read the copy {copy}",
            error.strerror or str(error),
            file=str(path),
            hint="take another copy: `minivm state list`",
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CopyError(f"read the copy {copy}", "wanted a plain file", file=str(path))
    return os.fdopen(fd, "rb")


def hash_file(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def find_newest_good(directory: Path, cluster: str, reads: range | None) -> Manifest | None:
    """Return the newest copy of this cluster's slurmctld that the installed Slurm reads and whose files are whole."""
    for manifest in load_readable(directory):
        is_read = manifest.has_state and (not reads or manifest.protocol in reads)
        if manifest.cluster.lower() != cluster.lower() or not is_read:
            continue
        try:
            verify(directory, manifest)
        except CopyError:
            continue
        return manifest
    return None


def load_proof(directory: Path, name: str) -> Proof | None:
    data = read_plain(directory / name / PROOF, 4096)
    try:
        proof = json.loads(data or b"")
        return Proof(float(proof["time"]), proof["ok"] is True, str(proof["text"]))
    except (ValueError, TypeError, KeyError):
        return None


def record_proof(directory: Path, name: str, proof: Proof) -> None:
    data = {"time": proof.time, "ok": proof.ok, "text": proof.text[:2000]}
    write_whole(directory / name / PROOF, json.dumps(data), mode=0o600)


def choose_name(directory: Path, at: float) -> str:
    """Return the name of a copy made now."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    used = set(list_names(directory))
    return next(name for name in (stamp, *(f"{stamp}-{count}" for count in range(2, 1000))) if name not in used)


def select_superfluous(copies: list[tuple[str, bool]], keep: int) -> list[str]:
    """Select what retention removes from (name, has a good proof), newest first.

    `keep` copies stay, and the newest proven one however old it is. Pure.
    """
    proven = next((name for name, is_proven in copies if is_proven), None)
    return [name for name, _ in copies[max(keep, 1) :] if name != proven]


# Jobs around a copy: two listings of slurmctld, between which the copy was made.

SQUEUE = ("/usr/bin/squeue", "--all", "--noheader", "--format=%i|%T")
# A job in one of these ends without any act of slurmctld's.
OVER = frozenset({"COMPLETING", "STAGE_OUT"})


def parse_jobs(text: str) -> dict[str, str]:
    """Return job -> state from squeue's lines, without jobs that have ended."""
    rows = (line.strip().rpartition("|") for line in text.splitlines())
    return {job: state for job, _, state in rows if job and state and state not in OVER}


@record(frozen=True, slots=True)
class JobsAround:
    """Jobs that are the same before and after the copy, which it must hold so, and those that are not."""

    settled: Mapping[str, str]
    changing: frozenset[str]

    @property
    def by_state(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(Counter(self.settled.values()).items()))


def compare_listings(before: Mapping[str, str], after: Mapping[str, str]) -> JobsAround:
    settled = {job: state for job, state in before.items() if after.get(job) == state}
    return JobsAround(settled, frozenset((before.keys() | after.keys()) - settled.keys()))


def list_differences(expected: JobsAround, restored: Mapping[str, str]) -> list[str]:
    """Compare a restored slurmctld's jobs with the copy's list; an empty list if all are there."""
    return [
        f"job {job} is {restored.get(job, 'missing')}, expected {state}"
        for job, state in expected.settled.items()
        if restored.get(job) != state
    ]


def count_unlisted(expected: JobsAround, restored: Mapping[str, str]) -> int:
    """Count restored jobs that the list does not know: they had ended, and slurmctld had not saved that yet."""
    # A task that started takes its number out of the pending rest, "7_[3-9]": the array itself was known.
    arrays = {_find_array(job) for job in expected.settled.keys() | expected.changing}
    return sum(_find_array(job) not in arrays for job in restored)


def _find_array(job: str) -> str:
    return job.partition("_")[0].partition("+")[0]


def find_highest(jobs: Iterable[str]) -> int:
    numbers = (_find_array(job) for job in jobs)
    return max((int(text) for text in numbers if text.isascii() and text.isdecimal() and len(text) < 12), default=0)


# The status line and the metrics of the copies: the newest, and the newest that was proven.

METRICS = "/run/minivm/metrics.d/state.prom"
SUMMARY = "/run/minivm/state.json"


@record(frozen=True, slots=True)
class CopiesSummary:
    count: int
    newest: str
    made: float  # 0: there is none
    proven: float
    failed: str  # why the newest one's proof failed


def summarize(directory: Path) -> CopiesSummary:
    manifests = list(load_readable(directory))
    proofs = [(manifest, load_proof(directory, manifest.name)) for manifest in manifests]
    proven = max((proof.time for _, proof in proofs if proof and proof.ok), default=0.0)
    last = proofs[0][1] if proofs else None
    failed = last.text if last is not None and not last.ok else ""
    return CopiesSummary(
        len(manifests), manifests[0].name if manifests else "", manifests[0].time if manifests else 0.0, proven, failed
    )


def render_metrics(seen: CopiesSummary) -> str:
    lines = family("minivm_state_copies", "Copies of this pod's state", [({}, str(seen.count))])
    lines += family(
        "minivm_state_copied_timestamp_seconds", "Time of the newest copy; 0: none", [({}, f"{seen.made:.0f}")]
    )
    lines += family(
        "minivm_state_proven_timestamp_seconds", "Time of the last good proof; 0: none", [({}, f"{seen.proven:.0f}")]
    )
    lines += family(
        "minivm_state_proof_failed", "1 if the newest copy's proof failed", [({}, str(int(bool(seen.failed))))]
    )
    return "\n".join(lines) + "\n"


def publish_summary(seen: CopiesSummary) -> None:
    Path(METRICS).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(METRICS), render_metrics(seen))
    data = {"made": seen.made, "proven": seen.proven, "newest": seen.newest, "failed": seen.failed}
    write_whole(Path(SUMMARY), json.dumps(data))


def read_status_line(now: float, path: Path = Path(SUMMARY)) -> str:
    """Return the line of `minivm status`; "" in a pod that makes no copies. It may have been written long ago."""
    data = read_plain(path, 8192, trusted=True)
    if data is None:
        return ""
    try:
        summary = json.loads(data)
        made_at, proven, failed = float(summary["made"]), float(summary["proven"]), str(summary["failed"])
    except (ValueError, TypeError, KeyError):
        return ""
    return describe_summary(now, made_at, proven, failed)


def describe_summary(now: float, made: float, proven: float, failed: str) -> str:
    if not made:
        return "saved state: no copy yet"
    text = f"saved state: copied {duration(max(0.0, now - made))} ago, "
    text += f"a copy proven {duration(max(0.0, now - proven))} ago" if proven else "no copy proven yet"
    return f"{text}; the newest cannot be restored: {failed}" if failed else text
