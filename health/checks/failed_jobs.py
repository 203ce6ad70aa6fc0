"""Jobs that failed on this node within an hour, and how jobs of the same users and names ended elsewhere.

The resident runner notes them (`note`), with what accounting has of the same jobs on other nodes; the source
`failed_jobs` prints them for the check `failing_jobs`. A job is the same if its user and name are: a fault of its code
then shows on every node.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ground.files import read_json, write_json
from health.api import Capture
from init.slurm.conf import expand

FILE = Path("/run/minivm/health/failed-jobs.json")
WITHIN_S = 3600.0
USERS = 3  # whose jobs fail here, before accounting is asked
ASK_AGAIN_S = 300.0
MOST, MOST_OF_A_USER = 200, 20
SACCT = "/usr/bin/sacct"
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}", re.ASCII)  # names that sacct's lists can hold
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A job that failed here, for what may be its code or the machine."""

    user: str
    name: str
    job: str
    at: float


@dataclass(frozen=True, slots=True)
class OtherRuns:
    """Ends of the same user's jobs of the same name within the hour."""

    passed_here: int = 0
    passed_elsewhere: int = 0
    failed_elsewhere: int = 0


def note(jobs: Iterable[FailedJob], node: str, now: float, run: Run, path: Path = FILE) -> str:
    """Add failed jobs, and ask accounting about the others where jobs of several users fail. Return what failed."""
    data = read_json(path)
    kept = [job for job in (*_parse_jobs(data), *jobs) if abs(now - job.at) <= WITHIN_S]
    of_user: Counter[str] = Counter()
    newest: list[FailedJob] = []
    for job in sorted(kept, key=lambda job: -job.at):
        of_user[job.user] += 1
        if of_user[job.user] <= MOST_OF_A_USER and len(newest) < MOST:
            newest.append(job)
    asked_at, runs, obstacle = _parse_number(data.get("asked_at")), data.get("runs"), str(data.get("obstacle", ""))
    if len(of_user) >= USERS and not 0 <= now - asked_at <= ASK_AGAIN_S:
        asked_at, runs, obstacle = now, [], ""
        try:
            elsewhere_runs = ask_other_runs(newest, node, run)
            runs = [[user, name, asdict(each)] for (user, name), each in elsewhere_runs.items()]
        except Exception as error:  # slurmdbd is away, or its answer is too long: it costs this comparison
            obstacle = (str(error) or repr(error))[:200]
    write_json(
        path,
        {"jobs": [asdict(job) for job in newest], "asked_at": asked_at, "runs": runs or [], "obstacle": obstacle},
        0o600,
    )
    return obstacle


def ask_other_runs(jobs: Iterable[FailedJob], node: str, run: Run) -> dict[tuple[str, str], OtherRuns]:
    """Ask accounting, with one command, how the same jobs ended in the last hour."""
    same = {(job.user, job.name) for job in jobs if PLAIN.fullmatch(job.user) and PLAIN.fullmatch(job.name)}
    if not same:
        return {}
    users, names = (",".join(sorted({each[place] for each in same})) for place in (0, 1))
    command = (
        SACCT, "--noheader", "--parsable2", "--allocations", "--starttime=now-1hours", "--endtime=now",
        "--state=CD,F,NF", f"--user={users}", f"--name={names}", "--format=User,JobName,State,NodeList",
    )  # fmt: skip
    counts: Counter[tuple[str, str, str]] = Counter()
    for line in run(command).splitlines():
        user, name, state, nodes = [*line.split("|"), "", "", "", ""][:4]
        is_here = node in expand(nodes[:65536])
        result = "passed" if state == "COMPLETED" else "failed"
        counts[user, name, f"{result}_{'here' if is_here else 'elsewhere'}"] += 1
    return {
        (user, name): OtherRuns(
            counts[user, name, "passed_here"],
            counts[user, name, "passed_elsewhere"],
            counts[user, name, "failed_elsewhere"],
        )
        for user, name in sorted(same)
    }


def failed_jobs(path: Path = FILE) -> Capture:
    """Print one line of JSON for each user and name of a job: what failed here, and how its other runs ended."""
    data = read_json(path)
    runs = {}
    for each in data.get("runs", []) if isinstance(data.get("runs"), list) else []:
        try:
            user, name, numbers = each
            runs[str(user), str(name)] = {key: int(numbers[key]) for key in OtherRuns.__dataclass_fields__}
        except (ValueError, TypeError, KeyError):
            continue
    groups: dict[tuple[str, str], list[FailedJob]] = {}
    for job in _parse_jobs(data):
        groups.setdefault((job.user, job.name), []).append(job)
    lines = []
    for (user, name), jobs in groups.items():
        ids, times = [job.job for job in jobs], [job.at for job in jobs]
        entry = {"user": user, "jobs": ids, "times": times, "other_runs": runs.get((user, name))}
        lines.append(json.dumps(entry))
    return Capture("\n".join([f"failed jobs {len(lines)}", *lines, "end", ""]))


def _parse_jobs(data: Any) -> list[FailedJob]:
    jobs = []
    for each in data.get("jobs", []) if isinstance(data.get("jobs"), list) else []:
        try:
            jobs.append(FailedJob(str(each["user"]), str(each["name"]), str(each["job"]), float(each["at"])))
        except (TypeError, KeyError, ValueError):
            continue
    return jobs


def _parse_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
