"""The ends of a job's tasks on this node, from slurmd's log: rank, exit code or signal, time.

slurmstepd writes a line for each (SlurmdDebug=verbose). A user may bring line ends into the log, as in the name of a
program, and so write lines of another job: a step counts only if its lines agree, from its start to each end, and
forged ones beside the real ones do not. A step that is forged as a whole is no step to accounting: `health.jobs.ranks`
compares.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping

LARGEST = 1 << 20  # of the log; beyond that its last half stays
MOST_STEPS = 16
MOST_FAILED = 16  # tasks of a step
OUT_OF_MEMORY = 253  # Slurm's own "signal"
_LINE = re.compile(
    rb"\[([0-9-]{10}T[0-9:]{8})(\.\d{3})?\] \[\d+\.(\d{1,10})(?:\+\d+)?\] "
    rb"(?:starting (?P<tasks>\d{1,7}) tasks"
    rb"|task (?P<rank>\d{1,7}) \((?P<pid>\d{1,10})\) "
    rb"(?:(?P<started>started) |exited with exit code (?P<code>\d{1,3})\."
    rb"|exited\. Killed by signal (?P<signal>\d{1,3})|(?P<memory>Out Of Memory)))"
)


def log() -> str:
    return f"{os.environ.get('MINIVM_LOG', '/var/log/minivm')}/slurmd.log"


class _Step:
    def __init__(self) -> None:
        self.tasks: list[int] = []  # of each line that tells how many start
        self.started: dict[int, int] = {}
        self.ended: set[int] = set()
        self.failed: list[tuple[int, int, int, float]] = []
        self.is_odd = False

    def add(self, match: re.Match[bytes]) -> None:
        if match["tasks"]:
            self.tasks.append(int(match["tasks"]))
            return
        rank, pid = int(match["rank"]), int(match["pid"])
        if match["started"]:
            self.is_odd |= rank in self.started
            self.started[rank] = pid
            return
        self.is_odd |= rank in self.ended or self.started.get(rank) != pid
        self.ended.add(rank)
        code, signal = int(match["code"] or 0), int(match["signal"] or 0) or (OUT_OF_MEMORY if match["memory"] else 0)
        if (code or signal) and len(self.failed) < MOST_FAILED:
            self.failed.append((rank, code, signal, _time(match)))

    @property
    def agrees(self) -> bool:
        return not self.is_odd and self.tasks == [len(self.started)]


def failed_steps(job: int, since: float) -> list[Mapping[str, object]]:
    """Return the job's last steps with failed tasks, as entries for a box: tasks are rank, code, signal, time."""
    # Local time as in the log: its lines are compared as texts, and a requeued job numbers its steps again.
    earliest = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since)).encode()
    steps: dict[int, _Step] = {}
    for line in _lines(_read(), b"] [%d." % job):
        if (match := _LINE.match(line)) and match[1] >= earliest:
            steps.setdefault(int(match[3]), _Step()).add(match)
    entries: list[Mapping[str, object]] = []
    for number in sorted(steps):
        step = steps[number]
        if step.failed:
            entry = {"kind": "step", "step": number, "tasks": len(step.started)}
            entries.append(entry | ({"failed": step.failed} if step.agrees else {"odd": True}))
    return entries[-MOST_STEPS:]


def trim() -> None:
    """Keep the last half of a log that became large. slurmd appends, so that it goes on at the new end."""
    with contextlib.suppress(OSError):
        if os.stat(log()).st_size > LARGEST:  # noqa: PTH116
            kept = _read()[-LARGEST // 2 :]
            os.truncate(log(), 0)
            fd = os.open(log(), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, kept[kept.find(b"\n") + 1 :])
            finally:
                os.close(fd)


def _lines(text: bytes, part: bytes) -> Iterator[bytes]:
    at = 0
    while (at := text.find(part, at)) >= 0:
        end = text.find(b"\n", at)
        end = end if end >= 0 else len(text)
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = end


def _read() -> bytes:
    try:
        fd = os.open(log(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, 2 * LARGEST, max(0, size - 2 * LARGEST))
    finally:
        os.close(fd)


def _time(match: re.Match[bytes]) -> float:
    try:
        whole = time.mktime(time.strptime(match[1].decode(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0
    return round(whole + float(match[2] or 0), 3)
