"""A job's black boxes: fetch them from its nodes, explain them, and pack them with the job's page for a support ticket.

A capsule has neither the script's text, nor its arguments, environment or output. What looks like a secret in names
and reasons is masked.

`find_failed_step` finds the task that failed first: when one task fails, Slurm or MPI ends the others. Times of two
nodes are compared by their clocks, as far as these are known.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ground.errors import counted
from ground.sockets import read_line
from ground.version import VERSION
from health import black_box, credentials
from health.black_box import OUT_OF_MEMORY
from health.jobs.explain import as_json
from health.jobs.model import (
    Answer,
    Fact,
    Job,
    JobCause,
    JobNode,
    JobStep,
    Page,
    Sure,
    duration,
    list_briefly,
    moment,
    safe,
    signal_name,
)
from init.errors import InitError
from init.slurm.conf import expand

MOST_NODES = 16
CONNECT_S = 2.0
WITHIN_S = 8.0
LONGEST_WORD = 100  # that a node says first
MOST_FACTS = 6  # of one node
OF_GPU = re.compile(r" on GPU (\d{1,3}) \(", re.ASCII)
Entry = dict[str, object]
WORDS = {
    "oom_kills": "the kernel ended {} processes on its machine for lack of memory",
    "oom_kills_of_jobs": "{} processes of jobs were ended at their memory limits",
    "rx_errors": "{} errors in receiving on network interface {name}",
    "tx_errors": "{} errors in sending on network interface {name}",
    "rx_dropped": "{} received packets dropped on network interface {name}",
    "tx_dropped": "{} sent packets dropped on network interface {name}",
    "link_losses": "network interface {name} lost its link {} times",
    "link_downed": "fabric port {name} lost its link {} times",
    "symbol_error": "{} symbol errors on fabric port {name}",
    "port_rcv_errors": "{} receive errors on fabric port {name}",
    "errors": "{} errors in the file system on disk {name}",
}


@dataclass(frozen=True, slots=True)
class Box:
    node: str
    entries: tuple[Entry, ...] = ()
    obstacle: str = ""  # why it could not be read
    # What the node's clock was ahead of this one, and by how much that may be wrong. None: not known.
    clock: tuple[float, float] | None = None

    @property
    def last_run(self) -> tuple[Entry, ...]:
        begins = [place for place, entry in enumerate(self.entries) if entry.get("kind") == "begin"]
        return self.entries[begins[-1] :] if begins else ()

    @property
    def set_meanwhile(self) -> float:
        """Return by how many seconds the clock was set during the last run; a boot counts as well."""
        return _choose_delay([entry for entry in self.last_run if entry.get("kind") in ("begin", "end")])

    @property
    def set_since(self) -> float:
        """Return by how many seconds it was set from the last run's start until now: `clock` is of now."""
        return _choose_delay([entry for entry in (*self.entries[:1], *self.last_run) if entry.get("kind") in STAMPED])


STAMPED = frozenset({"begin", "end", "now"})
OF_EARLIER_RUN = "it has no black box of the job's last run"


def keep_last_run(box: Box, job: Job, *, was_requeued: bool) -> Box:
    """Leave out what the node noted in an earlier run or after the job.

    A killed prolog leaves the box of the run before, and a killed epilog an open one, which the broker goes on with.
    """
    run = box.last_run
    ahead, doubt = box.clock or (0.0, UNKNOWN_CLOCK_S)
    doubt += UNKNOWN_CLOCK_S  # the job's times are slurmctld's
    began = run[0].get("at") if run else None
    # A boot between two runs looks like a clock that was set: then rather no box than the wrong one.
    if was_requeued and isinstance(began, float | int) and began - ahead + doubt < job.started:
        return replace(
            box, entries=tuple(e for e in box.entries[:1] if e.get("kind") == "now"), obstacle=OF_EARLIER_RUN
        )
    if not job.has_ended or not job.ended:
        return box
    entries: list[Entry] = []
    for entry in box.entries:
        at = entry.get("at")
        after = at - ahead - doubt - box.set_since - job.ended if isinstance(at, float | int) else 0.0
        if entry.get("kind") == "seen" and after > black_box.AFTER_S:
            continue
        is_late = entry.get("kind") == "end" and after > black_box.AFTER_S
        entries.append({**entry, "late": after + doubt} if is_late else entry)
    return replace(box, entries=tuple(entries))


def _choose_delay(entries: Iterable[Entry]) -> float:
    boots = [
        at - boot
        for entry in entries
        if isinstance(at := entry.get("at"), int | float) and isinstance(boot := entry.get("boot"), int | float)
    ]
    moved = max(boots) - min(boots) if boots else 0.0
    return moved if moved > CLOCKS_S else 0.0


Fetch = Callable[[Job, Sequence[JobNode]], tuple[Box, ...]]


def fetch(job: Job, nodes: Sequence[JobNode]) -> tuple[Box, ...]:
    """Ask the job's first nodes at once, each for some seconds."""
    wanted = expand(job.nodes[:65536])
    addresses = {node.name: node.address for node in nodes}
    asked = [name for name in wanted[:MOST_NODES] if name]
    if not asked:
        return ()
    if len(asked) == 1:
        return (_fetch_one(job.id, asked[0], addresses.get(asked[0], "")),)
    from concurrent.futures import ThreadPoolExecutor  # imported late: it costs a page of one node more than its box

    with ThreadPoolExecutor(len(asked)) as pool:
        boxes = tuple(pool.map(lambda name: _fetch_one(job.id, name, addresses.get(name, "")), asked))
    if len(wanted) > MOST_NODES:
        boxes += (
            Box(counted(len(wanted) - MOST_NODES, "more node"), obstacle=f"only the first {MOST_NODES} were asked"),
        )
    return boxes


def _fetch_one(job: int, node: str, address: str) -> Box:
    if os.geteuid() == 0 and node == os.environ.get("MINIVM_POD_NAME"):
        from health import tasks  # imported late: a page of one's own node alone needs it

        box = tasks.lead(black_box.find(job, None), job, node)
        return Box(node, tuple(black_box.parse_lines(box)), clock=(0.0, 0.0))
    if not (by := credentials.way()):
        return Box(node, obstacle="no daemon here signs for Slurm: neither munged nor sackd has a socket")
    if not address:
        return Box(node, obstacle="Slurm has no address of it now")
    began = time.time()
    try:
        question, answer = _exchange(job, node, address, by)
        ended = time.time()
        if not answer:
            return Box(node, obstacle="it gave no answer")
        try:
            signer, text = credentials.unseal(answer, by)
        except OSError as error:
            return Box(node, obstacle=safe(f"its answer is refused: {error}", 200))
    except OSError as error:
        return Box(node, obstacle=safe(error.strerror or str(error), 200))
    head, _, box = text.partition(b"\n")
    # Only root on the node signs so; an answer to another question is none.
    if signer != 0 or head != question.encode():
        return Box(node, obstacle="its answer is not root's, or answers another question")
    entries = black_box.parse_lines(box)
    clock = None
    if entries and entries[0].get("kind") == "now":
        at = entries[0].get("at")
        if isinstance(at, float | int) and 0 <= at < 1 << 40 and ended >= began:
            clock = at - (began + ended) / 2, (ended - began) / 2
    return Box(node, tuple(entries), clock=clock)


def _exchange(job: int, node: str, address: str, by: str) -> tuple[str, bytes]:
    deadline = time.monotonic() + WITHIN_S
    with socket.create_connection((address, black_box.port() or black_box.PORT), CONNECT_S) as connection:
        word = ""
        if by == credentials.SLURM:
            word = read_line(connection, deadline - time.monotonic(), LONGEST_WORD).decode("ascii", "replace").strip()
        question = black_box.question(job, node, word)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(credentials.seal(question.encode(), 0, by))
        return question, read_line(connection, deadline - time.monotonic(), black_box.LARGEST_SENT)


WHILE = "while it ran"


def explain(boxes: Iterable[Box], job: Job) -> tuple[list[Fact], list[str]]:
    """Return what moved on the nodes during the job's last run, and what is not known."""
    facts: list[Fact] = []
    unknown: list[str] = []
    silent: dict[str, list[str]] = {}
    for box in boxes:
        node = safe(box.node, 80)
        if box.obstacle:
            silent.setdefault(safe(box.obstacle, 200), []).append(box.node)
            continue
        last = box.last_run
        if not last and job.has_ended:
            silent.setdefault("it has no black box of the job", []).append(box.node)
        own = last[0].get("gpus") if last else None
        texts = [
            f"{safe(text)} ({_time(entry)})"
            for entry in last
            if entry.get("kind") == "seen" and _is_about(text := str(entry.get("text", "")), own)
        ]
        ends = [entry for entry in last if entry.get("kind") == "end"]
        moved_texts = [
            text for entry in ends[:1] for text in (*_list_grown(entry.get("grown")), *_list_full(entry.get("full")))
        ]
        late = ends[0].get("late") if ends else None
        while_ = f"from its start to its epilog, {duration(late)} after its end" if isinstance(late, float) else WHILE
        odd = [safe(str(entry.get("step")), 20) for entry in last if entry.get("kind") == "step" and entry.get("odd")]
        if odd:
            unknown.append(f"which tasks of step {list_briefly(odd)} failed on {node}: slurmd's log there is not whole")
        if job.has_ended and job.state != "COMPLETED" and (moved := box.set_since):
            unknown.append(
                f"when exactly tasks on {node} ended: since the job's start its clock was set by {duration(moved)},"
                " or the node booted"
            )
        if last and not ends and job.has_ended:
            unknown.append(f"what {node} counted while it ran: its epilog has not written that")
        shown = [*((while_, text) for text in moved_texts), *((WHILE, text) for text in texts)]
        facts += [Fact(f"on {node} {when}: {text}", f"black box of {node}") for when, text in shown[:MOST_FACTS]]
    unknown += [f"what {list_briefly(nodes)} recorded while it ran: {obstacle}" for obstacle, nodes in silent.items()]
    return facts, unknown


def _is_about(text: str, gpus: object) -> bool:
    """Tell if a text is about the job; not if it counts errors of a GPU that is another job's."""
    match = OF_GPU.search(text)
    return match is None or not isinstance(gpus, list) or int(match[1]) in gpus


def _list_grown(values: object) -> list[str]:
    texts = []
    for key, number in values.items() if isinstance(values, dict) else ():
        *name, counter = str(key).split("/")
        if counter in WORDS and isinstance(number, int) and number > 0:
            texts.append(WORDS[counter].format(number, name=safe("/".join(name[1:]), 60)))
    return texts


def _list_full(values: object) -> list[str]:
    return [f"{safe(str(place), 60)} was full at its end" for place in values] if isinstance(values, list) else []


def _time(entry: Entry) -> str:
    at = entry.get("at")
    return moment(at) if isinstance(at, int | float) and 0 <= at < 1 << 40 else "no time"


MASK = "********"
SECRETS = (
    re.compile(
        r"(?i)((?:secret|passwo?r?d|passwd|token|credential|private|api[_-]?key|access[_-]?key|authorization)[\w-]*\"?"
        r"(?:\s*[=:]\s*|\s+)(?:bearer\s+|basic\s+)?)[^\s,;\"']+"
    ),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(r"()\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|eyJ)[\w.-]{12,}"),
)
UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


def capsule_name(page: Page) -> str:
    return f"minivm-job-{UNSAFE.sub('-', page.job.shown)[:60]}.tar.gz"


def write_capsule(path: Path, page: Page, boxes: Iterable[Box], now: float) -> None:
    """Write a new archive for its owner alone; a file that exists is left as it is."""
    import tarfile  # imported late: a page needs none

    folder = capsule_name(page).removesuffix(".tar.gz")
    about = {
        "minivm": VERSION,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "script": Path(page.job.command.partition(" ")[0]).name[:100],
    }
    members = {"page.json": _json({**about, **as_json(page)}) + "\n"}
    for box in boxes:
        if box.entries:
            name = f"boxes/{UNSAFE.sub('-', box.node)[:80]}.jsonl"
            members[name] = "".join(f"{_json(entry, None)}\n" for entry in box.entries)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for name, text in members.items():
            data = text.encode()
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(data), int(now), 0o600
            packed.addfile(member, io.BytesIO(data))
    try:
        _write_new(path, archive.getvalue())
    except FileExistsError:
        raise InitError(f"write {path}", "it exists; name another file, or remove it") from None
    except OSError as error:
        raise InitError(f"write {path}", f"{error.strerror}; name a file in a directory of yours") from error


NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})


def _write_new(path: Path, data: bytes) -> None:
    """Give the name to a file that is whole: a kill leaves no part of it. Raise FileExistsError where it exists.

    A file system without nameless files, such as NFS, gets a hidden one first. A killed call leaves it, and the next
    call for the same name removes it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hidden = ""
    try:
        start = f".minivm-capsule.{zlib.crc32(os.fsencode(path.name)):08x}."
        for name in os.listdir(folder):  # noqa: PTH208 (a descriptor)
            if name.startswith(start):
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        try:
            fd = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in NO_NAMELESS_FILES:
                raise
            hidden = f"{start}{os.getpid()}"
            fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
            # With a directory's descriptor, which the absolute path does not use, Python follows the link in /proc.
            try:
                os.link(hidden or f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                if not hidden or isinstance(error, FileExistsError):
                    raise
                os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)  # no hard links there either
    finally:
        if hidden:
            with suppress(OSError):
                os.unlink(hidden, dir_fd=folder)
        os.close(folder)


def mask_secrets(value: object) -> object:
    """Mask what looks like a secret in all texts of a JSON value."""
    if isinstance(value, str):
        for secret in SECRETS:
            value = secret.sub(rf"\g<1>{MASK}", value)
        return value
    if isinstance(value, dict):
        return {str(mask_secrets(str(key))): mask_secrets(item) for key, item in value.items()}
    return [mask_secrets(item) for item in value] if isinstance(value, list) else value


def _json(value: object, indent: int | None = 1) -> str:
    return json.dumps(mask_secrets(value), indent=indent)


TERM = 15  # by which Slurm and MPI end the other tasks: never the first failure where another is close
CLOSE_S = 0.05  # of two tasks on one node: slurmstepd collects their ends one after the other
CLOCKS_S = 0.5  # by which clocks may have moved since, at least
UNKNOWN_CLOCK_S = 10.0
LINKS = frozenset({"link_losses", "link_downed"})
BLAMED = frozenset({JobCause.CODE, JobCause.REQUEST, JobCause.LIMIT, JobCause.UNKNOWN, JobCause.MACHINE})


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    node: str
    code: int
    signal: int
    at: float  # by this clock
    doubt: float  # seconds by which it may be wrong
    own_doubt: float = 0.0  # beside times of the same node

    @property
    def end(self) -> str:
        if self.signal == OUT_OF_MEMORY:
            return "out of memory"
        return f"killed by {signal_name(self.signal)}" if self.signal else f"exit code {self.code}"

    @property
    def named(self) -> str:
        return f"task {self.rank} on {safe(self.node, 80)}"

    def is_clearly_earlier(self, other: Failure) -> bool:
        margin = CLOSE_S + self.own_doubt if self.node == other.node else CLOCKS_S + self.doubt + other.doubt
        return other.at - self.at > margin

    def is_surely_before(self, other: Failure) -> bool:
        is_a_consequence = other.signal == TERM != self.signal and not other.is_clearly_earlier(self)
        return is_a_consequence or self.is_clearly_earlier(other)


@dataclass(frozen=True, slots=True)
class FailedStep:
    name: str
    failures: tuple[Failure, ...]  # by time
    tasks: int  # on the nodes that told
    is_whole: bool  # each node of the job told of its tasks

    @property
    def first(self) -> Failure:
        return self.failures[0]

    @property
    def rivals(self) -> tuple[Failure, ...]:
        """Return those that may have failed first as well."""
        return tuple(each for each in self.failures[1:] if not self.first.is_surely_before(each))

    @property
    def sentence(self) -> str:
        seen = "" if self.is_whole else " of the nodes that told"
        if self.rivals:
            names = list_briefly(each.named for each in (self.first, *self.rivals))
            why = "too close together to tell apart"
            if doubts := {each.node: each.doubt for each in (self.first, *self.rivals) if each.doubt >= CLOCKS_S}:
                most = duration(max(doubts.values()))
                why = f"in an order that is not known, since the clock of {list_briefly(doubts)} may differ by {most}"
            return f"Of step {self.name}{seen} these failed first, {why}: {names}."
        return f"First{seen} failed {self.first.named}, in step {self.name}: {self.first.end}."


def find_failed_step(boxes: Iterable[Box], job: Job) -> FailedStep | None:
    """Return the last step of which a task failed: the job went on after an earlier one."""
    failures: dict[int, list[Failure]] = {}
    tasks: dict[int, int] = {}
    gaps: set[int] = set()
    is_whole = True
    # A user of the node can forge all lines of a step in slurmd's log, but no step in accounting.
    recorded = {step.id.rpartition(".")[2] for step in job.steps} - {""}
    for box in boxes:
        run = box.last_run
        # Lines before the start are another run's, and a clock that was set back puts this run's there.
        is_whole &= not box.set_meanwhile
        is_closed = any(entry.get("kind") == "end" for entry in run)
        is_whole &= not box.obstacle and is_closed
        # A cut epilog may lack the steps that count; one that runs again notes a step twice.
        steps = {
            number: entry
            for entry in run
            if is_closed and entry.get("kind") == "step" and isinstance(number := entry.get("step"), int)
        }
        for number, entry in steps.items():
            if recorded and str(number) not in recorded:
                continue
            if entry.get("odd"):
                gaps.add(number)
            ran = entry.get("tasks")
            tasks[number] = tasks.get(number, 0) + (ran if isinstance(ran, int) else 0)
            failures.setdefault(number, []).extend(_find_failures(box, entry))
    numbers = [number for number, failed in failures.items() if failed]
    if not numbers:
        return None
    last = max(numbers)
    if not is_whole and any(_failed_after(step, last) for step in job.steps):
        return None  # the nodes with its failures have not told
    ordered = sorted(failures[last], key=lambda each: each.at)
    own = next((each for each in ordered if each.signal != TERM), ordered[0])
    if not ordered[0].is_clearly_earlier(own):
        ordered.remove(own)
        ordered.insert(0, own)
    return FailedStep(f"{job.shown}.{last}", tuple(ordered), tasks[last], is_whole and last not in gaps)


def _failed_after(step: JobStep, number: int) -> bool:
    name = step.id.rpartition(".")[2]
    return name.isdecimal() and int(name) > number and bool(step.exit_code or step.signal)


def _find_failures(box: Box, entry: Entry) -> Iterable[Failure]:
    ahead, doubt = box.clock or (0.0, UNKNOWN_CLOCK_S)
    doubt += box.set_since
    failed = entry.get("failed")
    for each in failed if isinstance(failed, list) else ():
        if isinstance(each, list) and len(each) == 4 and all(isinstance(part, int | float) for part in each):
            rank, code, signal, at = each
            if 0 <= at < 1 << 40:
                yield Failure(int(rank), box.node, int(code), int(signal), at - ahead, doubt, box.set_meanwhile)


def list_failure_facts(step: FailedStep) -> Sequence[Fact]:
    first = step.first
    source = f"black box of {safe(first.node, 80)}"
    ended = "ended" if step.rivals else "ended first" if step.is_whole else "ended first of the nodes that told"
    shown = [Fact(f"step {step.name}: {first.named} {ended}, {moment(first.at)}: {first.end}", source)]
    rest = step.failures[1:]
    if rest:
        after = duration(rest[0].at - first.at)
        names = list_briefly(f"{each.named} ({each.end})" for each in rest)
        followed = f"by the nodes' clocks {after} later" if step.rivals else f"after {after} followed"
        shown.append(Fact(f"step {step.name}: {followed} {names}", "black boxes of its nodes"))
    return shown


def add_failures(answer: Answer, boxes: Sequence[Box], job: Job) -> Answer:
    """Name the first failure in the answer for a job that failed."""
    step = find_failed_step(boxes, job) if job.has_ended and job.state != "COMPLETED" else None
    if step is None:
        return answer
    answer = replace(answer, evidence=(*answer.evidence, *list_failure_facts(step)))
    if step.tasks < 2 or answer.cause not in BLAMED or job.state not in ("FAILED", "OUT_OF_MEMORY"):
        return answer
    answer = replace(answer, headline=f"{step.sentence} {answer.headline}")
    if answer.cause is JobCause.UNKNOWN and step.first.code and step.is_whole and not step.rivals:
        answer = replace(answer, cause=JobCause.CODE, sure=Sure.LIKELY)
    return answer


def add_links(answer: Answer, boxes: Iterable[Box]) -> Answer:
    """Blame a machine, with doubt, where a link was lost and no more than a network's error is known."""
    lost = [
        box.node
        for box in boxes
        for entry in box.last_run
        if entry.get("kind") == "end" and "late" not in entry and isinstance(grown := entry.get("grown"), dict)
        and any(str(key).rpartition("/")[2] in LINKS and isinstance(n, int) and n > 0 for key, n in grown.items())
    ]  # fmt: skip
    if not lost or answer.cause not in (JobCause.CODE, JobCause.UNKNOWN):
        return answer
    head = f"{answer.headline} A machine's fault is possible too: {list_briefly(lost)} lost a link while it ran."
    advice = (
        f"submit it again without what lost one: sbatch --exclude={safe(','.join(lost[:4]), 200)}",
        *answer.advice,
    )
    return replace(answer, headline=head, cause=JobCause.MACHINE, sure=Sure.POSSIBLE, advice=advice)
