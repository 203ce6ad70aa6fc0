"""Count the generated faults of users and of machines that `minivm job` calls the machine's.

`python -m bench blame`. A machine's fault is a recorded world of tests/recordings (GPUs, kernel log, fabric, disks, as
tools printed them) in which a check must find a problem of the node, a node that slurmctld lost, or a link that a black
box counted as lost. The checks judge the world, the broker decides by their verdicts, and the page reads the node's
reason, the job's output and its black boxes. A user's fault is an error of a program or of a request, in a world
without a problem of the node: healthy, or made sick by users. Random: seeds, sizes, times, ranks, clocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from health.api import Result
from health.broker.decide import Seen, observe, reason, select_raised
from health.checks.cases import Case, judge_case, read_case
from health.checks.load import load_checks
from health.jobs import boxes as black_boxes
from health.jobs import output
from health.jobs.boxes import Box
from health.jobs.explain import explain
from health.jobs.model import Job, JobCause, JobNode, JobStep, Page, World
from health.policy import BrokerPolicy
from health.verdict import Class, Verdict

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "scripts"
FAULTS = 1000
NOW = 1_795_800_000.0
BOOT = "boot"
MACHINE, USER = "the machine", "a user"
CLOSED = 3.0  # seconds after which a rank's failure has ended the other ranks


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded world, and what the checks say of it."""

    name: str
    verdicts: tuple[Verdict, ...]
    is_broken: bool  # by the recording's known meaning


@dataclass(frozen=True, slots=True)
class FaultyJob:
    """A job that failed, and the traces of its fault."""

    kind: str
    job: Job
    nodes: tuple[JobNode, ...]
    text: str = ""  # of its output
    boxes: tuple[Box, ...] = ()


def recorded_worlds() -> list[Recorded]:
    """Judge each recording of a node by its checks."""
    loaded = load_checks(TREE).checks
    paths = [*(ROOT / "tests/recordings").rglob("case.json"), *TREE.glob("health.d/recordings/*/case.json")]
    worlds = []
    for path in sorted(paths):
        case: Case = read_case(path.parent)
        checks = [check for check in case.expect if check in loaded]
        verdicts = tuple(judge_case(loaded[check], TREE, case).verdict for check in checks)
        # A recording may leave the class out where only the result is its point.
        problems = [class_ for result, class_ in case.expect.values() if result is Result.PROBLEM]
        if verdicts and None not in problems and "never" not in {BrokerPolicy().checks.get(check) for check in checks}:
            is_broken = any(class_ is not Class.USER for class_ in problems)
            worlds.append(Recorded("/".join(path.parts[-3:-1]), verdicts, is_broken))
    return worlds


def drain_reason(verdicts: tuple[Verdict, ...], at: float) -> str:
    """Return the reason with which the broker drains a node of these verdicts; "" if it does not."""
    policy, memory = BrokerPolicy(), dict[str, Seen]()
    for turn in range(3):
        now = at + turn * 60
        fresh = [replace(verdict, at=now, expires=now + 150, boot_id=BOOT) for verdict in verdicts]
        memory = observe(memory, fresh, policy, now, BOOT)
    standing = select_raised(memory)
    return reason(standing) if standing else ""


class Generator:
    def __init__(self, seed: int, worlds: list[Recorded]) -> None:
        self.random = random.Random(seed)
        self.broken = [world for world in worlds if world.is_broken]
        self.sound = [world for world in worlds if not world.is_broken]

    def job(self, state: str, **changes: Any) -> Job:
        """Return a job that has ended, on one node to eight."""
        count = self.random.choice((1, 1, 2, 4, 8))
        ran = self.random.uniform(30, 86400)
        nodes = f"w[0-{count - 1}]" if count > 1 else "w0"
        number = self.random.randrange(1, 1 << 20)
        job = Job(
            number, str(number), name="train", user="alice", partition="main", states=frozenset({state}),
            submitted=NOW - ran - 60, eligible=NOW - ran - 60, started=NOW - ran, ended=NOW, limit=2880, nodes=nodes,
            node_count=count, cpus=count * 8, memory="64G", memory_per_node=65536, source="sacct",
        )  # fmt: skip
        return replace(job, **changes)

    def nodes(self, job: Job, reasons: Mapping[int, tuple[str, float]]) -> tuple[JobNode, ...]:
        made = []
        for number in range(8):
            text, since = reasons.get(number, ("", 0.0))
            states = frozenset({"IDLE", "DRAIN"}) if text else frozenset({"IDLE"})
            place = JobNode(f"w{number}", states=states, partitions=frozenset({"main"}), cpus=64, memory=262144)
            made.append(replace(place, reason=text, author="root" if text else "", since=since))
        return tuple(made)

    def world(self, job: Job, worlds: list[Recorded]) -> tuple[str, tuple[JobNode, ...]]:
        """Put one of the job's nodes into a recorded world, late in the job's time."""
        chosen = self.random.choice(worlds)
        at = NOW - self.random.uniform(0, min(600, NOW - job.started))
        text = drain_reason(chosen.verdicts, at)
        place = self.random.randrange(job.node_count)
        return chosen.name, self.nodes(job, {place: (text, at)} if text else {})

    def boxes(self, job: Job, code: int, signal: int, grown: Mapping[str, int]) -> tuple[Job, tuple[Box, ...]]:
        """Let rank 0 or another fail first, and the other ranks after it; clocks differ by up to ten seconds."""
        first = self.random.randrange(job.node_count)
        at = NOW - self.random.uniform(5, 20)
        boxes = []
        for number in range(job.node_count):
            ahead = self.random.uniform(-10, 10)
            end = [number, code, signal, at + ahead] if number == first else [number, 0, 15, at + CLOSED + ahead]
            entries = (
                {"kind": "begin", "at": job.started + ahead},
                {"kind": "step", "step": 0, "tasks": 1, "failed": [end]},
                {"kind": "end", "at": NOW + ahead, "grown": dict(grown) if number == first else {}},
            )
            boxes.append(Box(f"w{number}", entries, clock=(ahead, 0.01)))
        return replace(job, steps=(JobStep(f"{job.id}.0", "FAILED", code, signal),)), tuple(boxes)

    def user_fault(self) -> FaultyJob:
        kind = self.random.choice(
            (*LIMITS, "exit", "exit", "signal", *("output",) * 4, "ranks", "ranks", "silent-rank")
        )
        if kind in LIMITS:
            state, changes = LIMITS[kind]
            job = self.job(state, **changes)
            return FaultyJob(kind, job, self.world(job, self.sound)[1])
        if kind == "signal":
            job = self.job("FAILED", signal=self.random.choice((4, 6, 7, 8, 9, 11, 25)))
        else:
            job = self.job("FAILED", exit_code=self.random.choice((1, 2, 3, 42, 126, 127, 134, 137, 139, 255)))
        world, nodes = self.world(job, self.sound)
        text, boxes = "", tuple[Box, ...]()
        if kind == "output":
            text = self.random.choice(USER_LINES)
        elif kind in ("ranks", "silent-rank"):
            job, boxes = self.boxes(job, job.exit_code, 0, {})
            own = f"[rank1]: {self.random.choice(USER_LINES)}\n" if kind == "ranks" else ""
            text = f"{own}[rank0]: {self.random.choice(CONSEQUENCES)}\n"
        return FaultyJob(f"{kind} {text.strip()[-60:]} ({world})", job, nodes, text, boxes)

    def machine_fault(self) -> FaultyJob:
        kind = self.random.choice(("lost", "link", *("world",) * 8))
        if kind == "lost":
            job = self.job("NODE_FAIL")
            return FaultyJob(kind, replace(job, failed_node="w0"), self.nodes(job, {0: ("Not responding", NOW - 30)}))
        job = self.job("FAILED", exit_code=self.random.choice((1, 134, 137, 255)))
        text = self.random.choice(("", *CONSEQUENCES, *MACHINE_LINES))
        if kind == "link":
            job = replace(job, nodes="w[0-3]", node_count=4)
            job, boxes = self.boxes(job, job.exit_code, 0, {"ib/mlx5_0/link_downed": self.random.randrange(1, 9)})
            text = f"[rank0]: {self.random.choice(CONSEQUENCES[:3])}\n"
            return FaultyJob(kind, job, self.nodes(job, {}), text, boxes)
        world, nodes = self.world(job, self.broken)
        return FaultyJob(world, job, nodes, text)


LIMITS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "memory": ("OUT_OF_MEMORY", {}),
    "time": ("TIMEOUT", {}),
    "output-file": ("FAILED", {"signal": 53, "output": "/nowhere/x"}),
    "cancelled": ("CANCELLED", {"killer": "alice"}),
    "deadline": ("DEADLINE", {}),
    "requeue": ("BOOT_FAIL", {"exit_code": 1, "reason": "JobLaunchFailure"}),  # by a program of its user
}
USER_LINES = (
    "Traceback (most recent call last):\nValueError: bad batch",
    "bash: line 1: no-such-program: command not found",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "OSError: [Errno 122] Disk quota exceeded: '/home/alice/x'",
    "OSError: [Errno 28] No space left on device",
    "ModuleNotFoundError: No module named 'torch'",
    "python3: error while loading shared libraries: libx.so.1: cannot open shared object file",
    "terminate called after throwing an instance of 'std::runtime_error'",
    "slurmstepd: error: couldn't chdir to `/nowhere': No such file or directory: going to /tmp instead",
    "AssertionError",
    "",
)
CONSEQUENCES = (
    "w0:12:40 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=12 opcode=0 len=0",
    "w0:12:40 [0] NCCL WARN Call to ibv_modify_qp failed with error No route to host",
    "torch.distributed.DistBackendError: NCCL error: unhandled system error",
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
MACHINE_LINES = (
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: the GPU has fallen off the bus",
)


def page_of(fault: FaultyJob) -> Page:
    page = explain(fault.job, World(nodes=fault.nodes), NOW + 60)
    error = output.find(fault.text, "/home/alice/out", fault.job)
    answer = black_boxes.add_failures(output.add(page.answer, error, fault.job), fault.boxes, fault.job)
    if error is not None and error.is_about_a_network:
        answer = black_boxes.add_links(answer, fault.boxes)
    return replace(page, answer=answer)


def tally(count: int, seed: int) -> tuple[Counter[tuple[str, JobCause]], dict[str, list[str]]]:
    """Count the causes that the pages name, by the author of the fault, and list the pages with a wrong cause."""
    generator = Generator(seed, recorded_worlds())
    causes: Counter[tuple[str, JobCause]] = Counter()
    wrong: dict[str, list[str]] = {USER: [], MACHINE: []}
    faults: Iterator[tuple[str, FaultyJob]] = (
        (author, generator.machine_fault() if author == MACHINE else generator.user_fault())
        for author in (USER, MACHINE)
        for _ in range(count)
    )
    for author, fault in faults:
        answer = page_of(fault).answer
        causes[author, answer.cause] += 1
        if (answer.cause is JobCause.MACHINE) != (author == MACHINE):
            wrong[author].append(f"{fault.kind}: {answer.headline}")
    return causes, wrong


def main() -> int:
    causes, wrong = tally(FAULTS, seed=1)
    right, blamed = causes[MACHINE, JobCause.MACHINE], causes[USER, JobCause.MACHINE]
    for (author, cause), number in sorted(causes.items()):
        print(f"{author:<12} {cause:<20} {number:5}")
    print(f"of {FAULTS} faults of machines and {FAULTS} of users: {blamed} of users blamed on machines (target 0)")
    print(f'"the machine": precision {right / max(1, right + blamed):.3f}, recall {right / FAULTS:.3f}')
    for author, kinds in wrong.items():
        for kind, number in Counter(kinds).most_common(12):
            print(f"wrong, {author}: {number:4} {kind[:220]}")
    return 0 if not blamed else 1
