"""`kill -9` before each change that a page's makers make: the next page is the same, or names the gap; no file is left.

strace sends the signal as a process enters a system call. A first run without a kill tells which calls there are.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from health import black_box
from health.jobs import boxes, shared
from health.jobs.boxes import Box
from health.jobs.model import Job
from health.verdict import OLD_S, remove_cut_verdicts
from tests.process.runner_world import World
from tests.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("strace"), reason="no strace; `make test` installs it"),
]

RECORDED = Path(__file__).resolve().parents[2] / "recordings/jobs"
CHANGES = ("openat", "write", "linkat", "unlinkat", "unlink", "rename", "mkdir", "fsync", "bind", "listen", "sendto")
CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)")
Point = tuple[str, int]  # a system call's name, and its number among those of this name

EXPLAIN = """
import json, os, sys
from pathlib import Path
from health.jobs import __main__ as command
from health.jobs.ask import Asker, find_pages
from health.jobs.boxes import Box
from health.jobs.explain import render_page

def run(argv):
    part = "nodes" if "nodes" in argv else "partitions" if "partitions" in argv else Path(argv[0]).name
    answer = json.loads((Path(sys.argv[1]) / f"24.11-{part}.json").read_text())
    if "jobs" in answer:
        answer["jobs"] = [job for job in answer["jobs"] if job["job_id"] == 14]
    return json.dumps(answer)

box = Box("slurm-worker-0", ({"kind": "begin", "at": 1, "text": os.urandom(20000).hex()},))
asker = Asker(run=run, user="alice", is_root=False, now=1795698440.0, fetch=lambda job, nodes: (box,))
pages = find_pages(asker, "14")
command._pack(asker, pages, sys.argv[2])
print(render_page(pages[0]))
"""


def run_traced(argv: Sequence[str], log: Path, *inject: str, env: dict[str, str] | None = None) -> int:
    """Run the program under strace; return its exit code, -9 for a killed one."""
    options = [word for each in inject for word in ("-e", f"inject={each}")]
    trace = ["strace", "-qq", "-esignal=none", "-y", "-e", f"trace={','.join(CHANGES)}", "-o", str(log)]
    return subprocess.run([*trace, *options, *argv], env=env, stdout=subprocess.DEVNULL).returncode


def list_points(log: Path, place: str) -> Iterator[Point]:
    """List the calls of one process from the first one that names the place."""
    seen: Counter[str] = Counter()
    has_begun = False
    for line in log.read_text().splitlines():
        if match := CALL.match(line):
            seen[match[1]] += 1
            has_begun = has_begun or place in match[2]
            if has_begun and "O_RDONLY|O_CLOEXEC)" not in line:
                yield match[1], seen[match[1]]


def kill_at(point: Point) -> str:
    return f"{point[0]}:signal=KILL:when={point[1]}"


def is_whole(capsule: Path) -> bool:
    with tarfile.open(capsule) as archive:
        return len([archive.extractfile(member).read() for member in archive if member.isfile()]) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("has_nameless_files", [True, False])
def test_a_killed_capsule_is_whole_or_absent_and_the_next_call_leaves_nothing_else(
    tmp_path: Path, has_nameless_files: bool
) -> None:
    folder, log = tmp_path / "home", tmp_path / "log"
    folder.mkdir()
    capsule = folder / "minivm-job-14.tar.gz"
    argv = [sys.executable, "-I", "-c", EXPLAIN, str(RECORDED), str(capsule)]
    assert run_traced(argv, log) == 0 and is_whole(capsule)
    calls = [CALL.match(line) for line in log.read_text().splitlines()]
    opened = [match[2] for match in calls if match and match[1] == "openat"]
    nameless = next(number for number, call in enumerate(opened, 1) if "O_TMPFILE" in call)
    refuse = () if has_nameless_files else (f"openat:error=EOPNOTSUPP:when={nameless}",)
    capsule.unlink()
    assert run_traced(argv, log, *refuse) == 0 and is_whole(capsule)
    points = [point for point in list_points(log, str(folder)) if has_nameless_files or point[0] != "openat"]
    assert {"write", "fsync", "linkat"} <= {name for name, _ in points}
    left = 0
    for point in points:
        capsule.unlink(missing_ok=True)
        assert run_traced(argv, log, *refuse, kill_at(point)) == -9, point
        if capsule.exists():
            assert is_whole(capsule), point
        left += len([path for path in folder.iterdir() if path != capsule])
        written = run_traced(argv, log, *refuse)
        assert is_whole(capsule), point
        if written == 0:
            assert list(folder.iterdir()) == [capsule], point
    assert has_nameless_files is (left == 0)


SERVE = """
import asyncio, sys
from pathlib import Path
from health.jobs import snapshot
answer = (Path(sys.argv[1]) / "24.11-squeue.json").read_text()
snapshot.SOCKET = Path(sys.argv[2])
snapshot.SOCKET.unlink(missing_ok=True)
asyncio.run(snapshot.serve(snapshot.SOCKET, lambda argv, as_nobody: answer))
"""


def test_a_killed_snapshot_costs_no_page(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    path = folder / "jobs.sock"
    served = [sys.executable, "-I", "-c", SERVE, str(RECORDED), str(path)]
    nodes = ("/usr/bin/scontrol", "--json", "show", "nodes")
    answer = (RECORDED / "24.11-squeue.json").read_text()

    def start(*inject: str) -> subprocess.Popen[bytes]:
        options = [word for each in inject for word in ("-e", f"inject={each}")]
        trace = ["strace", "-D", "-f", "-qq", "-esignal=none", "-y", "-e", f"trace={','.join(CHANGES)}", "-o", str(log)]
        started.append(subprocess.Popen([*trace, *options, *served]))
        return started[-1]

    def ask() -> str:
        asked = shared.Shared(lambda argv: answer, path)
        text = asked(nodes)
        assert text == answer, "half an answer is none"
        return "old" if asked.is_old else "direct"

    service = start()
    until(lambda: ask() == "old", "the snapshot answers")
    until(lambda: "sendto" in log.read_text(), "the answer is in the log")
    service.kill()
    service.wait()
    points = [point for point in list_points(log, str(path)) if point[0] not in ("openat", "write")]
    assert {"bind", "listen", "sendto"} <= {name for name, _ in points}, points
    for point in points:
        service = start(kill_at(point))
        until(lambda: ask() and service.poll() is not None, f"it is killed at {point}")  # noqa: B023
        assert ask() == "direct", point
        assert [each.name for each in folder.iterdir()] in ([], [path.name]), point
    service = start()
    until(lambda: ask() == "old", "the next service takes the socket that a kill left")


JOB = Job(
    id=42, shown="42", states=frozenset({"FAILED"}), nodes="w0", restarts=1, exit_code=1,
    started=time.time() - 1, ended=time.time() + 1,
)  # fmt: skip
BOOT = time.clock_gettime(time.CLOCK_BOOTTIME)
EARLIER = (
    {"kind": "begin", "at": JOB.started - 1000, "boot": BOOT - 1000, "counters": {"net/eth0/link_losses": 1}},
    {"kind": "step", "step": 0, "tasks": 1, "failed": [[0, 9, 0, JOB.started - 900]]},
    {"kind": "end", "at": JOB.started - 800, "boot": BOOT - 800, "grown": {"net/eth0/link_losses": 7}},
)
GAPS = (boxes.OF_EARLIER_RUN, "its epilog has not written that", "it has no black box of the job")


def make_page(world: World) -> tuple[str, str]:
    now = {"kind": "now", **black_box.stamp(time.time())}
    entries = black_box.parse_lines(read_box(world))
    # Tests beside this one move what this machine counts, so that of counters only the earlier run's stay.
    entries = [entry if entry in EARLIER else {**entry, "grown": {}, "full": []} for entry in entries]
    box = boxes.keep_last_run(Box("w0", (now, *entries), clock=(0.0, 0.0)), JOB, was_requeued=True)
    facts, unknown = boxes.explain([box], JOB)
    step = boxes.find_failed_step([box], JOB)
    return "\n".join([*(fact.text for fact in facts), *([step.sentence] if step else [])]), "\n".join(unknown)


def read_box(world: World) -> bytes:
    return b"".join(path.read_bytes() for path in (world.root / "log/boxes").glob("42.61234.*"))


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_runner_killed_at_its_box_leaves_a_named_gap_and_no_file(tmp_path: Path, kind: str) -> None:
    """Kill the runner of a requeued job whose box of the earlier run has a lost link and a failed step."""
    world = World(tmp_path / "world")
    world.script("prolog.d/10-x", "#!/bin/sh\nexit 0\n")
    world.script("epilog.d/10-x", "#!/bin/sh\nexit 0\n")
    log = tmp_path / "trace"
    place = world.root / "log/boxes"
    program = [sys.executable, "-I", "-c", f"from health.runner.run import main; raise SystemExit(main({kind!r}))"]
    env = {**world.environment, "SLURM_JOB_EXIT_CODE": "256", "PATH": "/usr/bin:/bin"}

    def prepare() -> None:
        shutil.rmtree(world.root / "log", ignore_errors=True)
        place.mkdir(parents=True)
        (place / "42.61234.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in EARLIER))
        if kind == "epilog":
            assert world.run("prolog")[0] == 0

    def list_files() -> set[str]:
        return {str(path.relative_to(world.root)) for path in world.root.rglob("*") if not path.is_dir()}

    for _ in range(2):  # the first one compiles modules
        prepare()
        assert run_traced(program, log, env=env) == 0
    if kind == "prolog":
        assert world.run("epilog", SLURM_JOB_EXIT_CODE="256")[0] == 0
    kept, whole = list_files(), make_page(world)
    assert not whole[1], whole
    points = list(list_points(log, "/boxes"))
    assert {"rename", "openat", "write"} <= {name for name, _ in points}, points
    gaps = set()
    for point in points:
        prepare()
        assert run_traced(program, log, kill_at(point), env=env) == -9, point
        for again in (False, True):
            if again:
                assert world.run("epilog", SLURM_JOB_EXIT_CODE="256")[0] == 0
            facts, unknown = make_page(world)
            assert "lost its link" not in facts and "exit code 9" not in facts, (point, "of the run before")
            if (facts, unknown) != whole:
                assert any(gap in unknown for gap in GAPS), (point, facts, unknown)
            gaps.add(unknown)
        remove_cut_verdicts(world.root / "verdicts", time.time() + 2 * OLD_S)  # as after the node's next jobs
        assert {re.sub(r"\.(run|jsonl)$", "", name) for name in list_files()} <= {
            re.sub(r"\.(run|jsonl)$", "", name) for name in kept
        }, point
    assert len(gaps) > 1, gaps
