"""Find the error that a failed job's own output names: a traceback's last line, a shell's message, CUDA, NCCL.

Only the job's user reads the files, with that user's rights: the end of a plain file of that user, written since the
job started. A line that a rank's failure brings about in other ranks counts only where no other line does.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from health.jobs.model import Answer, Fact, Job, JobCause, Sure, safe

STAT_S = 2.0  # a home that hangs costs the page one line
MOST_READ = 256 * 1024
LONGEST_LINE = 400
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: re.Pattern[str]
    sentence: str
    cause: JobCause = JobCause.CODE
    sure: Sure = Sure.LIKELY
    advice: tuple[str, ...] = ()
    codes: frozenset[int] = frozenset()  # exit codes that it explains; empty: any
    is_consequence: bool = False  # the failure of another rank brings such a line about


@dataclass(frozen=True, slots=True)
class OutputError:
    """A line of the output that names an error."""

    line: str
    rule: Rule
    path: str
    rank: int | None = None
    node: str = ""

    @property
    def is_about_a_network(self) -> bool:
        """True if a link that was lost would explain the line, as the end of another rank does."""
        return self.rule.is_consequence and self.rule.cause is JobCause.UNKNOWN


def _rule(
    pattern: str,
    sentence: str,
    cause: JobCause = JobCause.CODE,
    *advice: str,
    sure: Sure = Sure.LIKELY,
    codes: Iterable[int] = (),
    is_consequence: bool = False,
) -> Rule:
    return Rule(re.compile(pattern, re.ASCII), sentence, cause, sure, advice, frozenset(codes), is_consequence)


SEGFAULT = (11, 139)
# The first rule that a line matches counts.
RULES = (
    _rule(
        r"CUDA out of memory|OutOfMemoryError: CUDA|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "it needs more memory of its GPU than there is",
        JobCause.REQUEST,
        "ask for a GPU with more memory, or give the program less work at a time (a smaller batch)",
    ),
    _rule(
        r"uncorrectable ECC error|ECC_UNCORRECTABLE|ECCUncorrectable|fallen off the bus",
        "its GPU reported a fault of its own",
        JobCause.MACHINE,
        "tell an operator the node, and submit it again without it: sbatch --exclude=...",
    ),
    _rule(
        r"illegal memory access was encountered|ILLEGAL_ADDRESS|device-side assert triggered|misaligned address",
        "a kernel of it did on the GPU what it may not",
        JobCause.CODE,
        "run it with CUDA_LAUNCH_BLOCKING=1: the line that fails is then the right one",
    ),
    _rule(
        r"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver",
        "it found no GPU",
        JobCause.REQUEST,
        "ask for GPUs: --gres=gpu:1; if it did, tell an operator the node",
        sure=Sure.POSSIBLE,
    ),
    _rule(
        r"NCCL WARN NET/IB|Got completion from peer .* with (?:status|error)|ibv_\w+ failed|Network is unreachable"
        r"|No route to host",
        "another rank ended first, or the network between its nodes failed",
        JobCause.UNKNOWN,
        "see what the nodes counted on their ports, and tell an operator if it happens again",
        sure=Sure.POSSIBLE,
        is_consequence=True,
    ),
    _rule(
        r"NCCL WARN|nccl\w{2,40}Error|NCCL error|collective operation timeout|ProcessGroupNCCL",
        "a collective of NCCL failed: another rank ended or waits, or the network failed",
        JobCause.UNKNOWN,
        "run it with NCCL_DEBUG=INFO; see which rank stopped first",
        sure=Sure.POSSIBLE,
        is_consequence=True,
    ),
    _rule(
        r"Disk quota exceeded",
        "your quota of a file system is used up",
        JobCause.LIMIT,
        "remove files, or ask for a larger quota",
    ),
    _rule(
        r"No space left on device",
        "a file system was full",
        JobCause.LIMIT,
        "write to another place, or remove files: df -h shows what is full",
    ),
    _rule(
        r"(?:couldn't|Unable to) chdir to",
        "the directory of --chdir, or in which it was submitted, is not on the node",
        JobCause.REQUEST,
        "submit it in a directory that the nodes have too, or name one: --chdir",
    ),
    _rule(
        r"error while loading shared libraries",
        "a library of its program is missing",
        JobCause.CODE,
        "load the modules or the environment in the script that the program was built with",
    ),
    _rule(
        r"^ModuleNotFoundError: |^ImportError: ",
        "Python found a module missing",
        JobCause.CODE,
        "activate the environment that has the module in the script; compare `which python3` there and here",
    ),
    _rule(
        r"^MemoryError\b|Cannot allocate memory|std::bad_alloc",
        "it got no more memory",
        JobCause.REQUEST,
        "submit it with a larger --mem",
    ),
    _rule(
        r"execve\(\): .*: (?:No such file|Permission denied)",
        "srun could not start its program",
        JobCause.CODE,
        "check the path of the program on the node, and that it may be executed",
    ),
    _rule(r": (?:command not found|No such file or directory|not found)$", "", codes=[127]),
    _rule(r": (?:Permission denied|cannot execute|Exec format error|Is a directory)", "", codes=[126]),
    _rule(r"^Fatal Python error: ", ""),
    _rule(
        r"Failing at address|(?:address not mapped to|invalid permissions for mapped) object at address",
        "",
        codes=SEGFAULT,
    ),
    _rule(r"Segmentation fault", "", codes=SEGFAULT, is_consequence=True),
    _rule(r"terminate called after throwing|Assertion .{1,300} failed|double free or corruption|free\(\): invalid",
          "it aborted itself"),
    _rule(r"^thread '.{1,80}' panicked at|^panic: |^Exception in thread |^ERROR: LoadError: ", ""),
    _rule(
        r"MPI_ABORT was invoked on rank|Connection (?:closed|reset) by (?:remote )?peer|Connection refused"
        r"|^(?:[\w.]{1,80}\.)?(?:ChildFailedError|BrokenPipeError|ConnectionResetError|EOFError|KeyboardInterrupt)\b",
        "it lost what it was connected to",
        sure=Sure.POSSIBLE,
        is_consequence=True,
    ),
)  # fmt: skip
PYTHON = _rule("", "")
_RANK = re.compile(r"\s*(?:\[(?:rank|Rank |default)(\d{1,6})\]:?|(\d{1,6}):)\s?", re.ASCII)  # torch; srun --label
_NCCL = re.compile(r"([\w.-]{1,80}):\d{1,10}:\d{1,10} \[-?\d{1,3}\] NCCL ", re.ASCII)
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,120}(?::\s.*)?", re.ASCII | re.DOTALL)
# Between two runs in one file: slurmstepd's word, and minivm's note after a job.
_NEXT_RUN = re.compile(
    r"^slurmstepd: error: \*\*\* JOB .* DUE TO JOB REQUEUE|^minivm: evidence and what to do: ", re.MULTILINE
)


def read(job: Job) -> OutputError | None:
    """Return the error that the caller's own job names in its output or its errors."""
    paths = tuple(dict.fromkeys(path for path in (job.errors, job.output) if path and path != "/dev/null"))
    errors = run_within(lambda: [error for path in paths if (error := find(_read_end(path, job.started), path, job))])
    return min(errors or (), key=lambda error: error.rule.is_consequence, default=None)


def age(path: str, started: float, now: float) -> float | None:
    """Return the seconds since the last write to the caller's own output file; None if that is not known here.

    The path is the node's: on a login pod the same path may be another file, so one of another user or from before the
    job does not count.
    """

    def look() -> float | None:
        status = os.stat(path)  # noqa: PTH116 (a user's path)
        is_own = status.st_uid == os.getuid() and status.st_mtime >= started - 1
        return max(0.0, now - status.st_mtime) if is_own else None

    return run_within(look)


def run_within(look: Callable[[], T]) -> T | None:
    """Look at a user's files for two seconds at most; None where that fails or takes longer."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(look())
        except (OSError, ValueError):
            return

    looking = threading.Thread(target=run, daemon=True)
    looking.start()
    looking.join(STAT_S)
    return answers[0] if answers else None


def _read_end(path: str, started: float) -> str:
    """Read the end of the caller's own plain file, if it was written since the job started."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 (a user's path)
            return ""  # to open a device or a pipe may do something
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mtime < started - 1:
            return ""
        text = os.pread(fd, MOST_READ, max(0, status.st_size - MOST_READ)).decode("utf-8", "replace")
    finally:
        os.close(fd)
    first, *later = _NEXT_RUN.split(text)
    runs = [run for run in (first, *(part.partition("\n")[2] for part in later)) if run.strip()]
    return runs[-1] if runs else ""


def find(text: str, path: str, job: Job) -> OutputError | None:
    """Return the last error of the rank that names one first; of a job without ranks in its output the last one."""
    last: dict[int | None, tuple[int, OutputError]] = {}
    for place, error in enumerate(_errors(text, path, job)):
        earlier = last.get(error.rank)
        if earlier is None or earlier[1].rule.is_consequence or not error.rule.is_consequence:
            last[error.rank] = place, error
    ordered = sorted(last.values(), key=lambda each: (each[1].rule.is_consequence, each[0]))
    return ordered[0][1] if ordered else None


def _errors(text: str, path: str, job: Job) -> Iterator[OutputError]:
    code = job.exit_code or job.signal
    in_traceback: set[int | None] = set()
    for whole in text.splitlines():
        line = whole[:LONGEST_LINE].rstrip()
        match = _RANK.match(line)
        rank = int(match[1] or match[2]) if match else None
        words = line[match.end() :] if match else line
        if words.startswith(_TRACEBACK):
            in_traceback.add(rank)
            continue
        if rank in in_traceback and (not words or words[0].isspace()):
            continue
        is_end = rank in in_traceback and bool(_EXCEPTION.fullmatch(words))
        in_traceback.discard(rank)
        rule = next((each for each in RULES if each.pattern.search(words)), PYTHON if is_end else None)
        if rule and (not rule.codes or code in rule.codes):
            host = _NCCL.search(words)
            yield OutputError(safe(words, 200), rule, path, rank, host[1] if host else "")


def add_full_disk(answer: Answer, job: Job) -> Answer:
    """Name a full file system in the answer for a job whose output names no error: it may be what cut the output."""
    if job.state != "FAILED" or answer.cause not in (JobCause.CODE, JobCause.UNKNOWN):
        return answer
    full = run_within(lambda: [path for path in (job.output, job.errors) if path.startswith("/") and _is_full(path)])
    if not full:
        return answer
    return replace(
        answer,
        headline=f"{answer.headline} The disk of its output is full now, and may have been then.",
        cause=JobCause.LIMIT,
        sure=Sure.POSSIBLE,
        evidence=(*answer.evidence, Fact("no byte is left on its file system", safe(full[0]))),
        advice=("make room there (df, du), or ask an operator; then submit the job again", *answer.advice),
    )


def _is_full(path: str) -> bool:
    room = os.statvfs(os.path.dirname(path))  # noqa: PTH120 (a user's path)
    return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)


def add(answer: Answer, error: OutputError | None, job: Job) -> Answer:
    """Name in the answer for a job that failed what its output says; a known cause that is not its code's stays."""
    if error is None:
        return answer
    rank = "" if error.rank is None else f"rank {error.rank}"
    writer = " on ".join(part for part in (rank, safe(error.node, 80)) if part)
    fact = Fact(f"{writer} wrote first: {error.line}" if writer else f"it wrote: {error.line}", safe(error.path))
    answer = replace(answer, evidence=(*answer.evidence, fact))
    if job.state != "FAILED" or answer.cause not in (JobCause.CODE, JobCause.UNKNOWN):
        return answer
    rule = error.rule
    meaning = f" ({rule.sentence})" if rule.sentence else ""
    return replace(
        answer,
        headline=f"{answer.headline} {f'First {writer} wrote' if writer else 'It wrote'}: {error.line}{meaning}.",
        cause=rule.cause,
        sure=rule.sure,
        advice=(*rule.advice, *answer.advice),
    )
