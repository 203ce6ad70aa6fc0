"""A node measures a running job's tasks, here real processes; only slurmstepd's list is written by the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from health import black_box, gpus, tasks
from tests.waiting import until

HEAD = "PID      JOBID    STEPID   LOCALID GLOBALID"
# It ends by itself: a test that is killed cannot end it.
SPIN = "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end: pass"
PAUSE = 0.05


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a folder on a disk; /tmp may be memory, of which the kernel counts no bytes."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start(disk: Path) -> Iterator[Callable[..., int]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, **env: str) -> int:
        """Start a process in a group of its own, and return its number."""
        argv = [sys.executable, "-c", code]
        started.append(subprocess.Popen(argv, cwd=disk, env={**os.environ, **env}, start_new_session=True))
        return started[-1].pid

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listing(*rows: tuple[int, str, int | None]) -> str:
    """Write as slurmstepd does: a process's number, its step, and the rank of a task's first process."""
    lines = [HEAD]
    for pid, step, rank in rows:
        places = f"{'-':<7} {'-':<8}" if rank is None else f"{0:<7} {rank:<8}"
        lines.append(f"{pid:<8} 12       {step:<8} {places}")
    return "\n".join([*lines, ""])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_listing_of_slurmstepd_is_parsed() -> None:
    text = (
        f"{HEAD}\n-1       3        extern   0       0        \n143944   3        extern   -       -        \n"
        "143992   3        0        0       0        \n143993   3        0        1       1        \n"
        "143997   3        0        -       -        \n143961   3        batch    0       0        \n"
        "7        3        1+2      0       6        \n"
    )
    ranks, pids = tasks.parse_listing(text)
    assert ranks == {143992: (0, 0), 143993: (0, 1), 7: (1, 6)}, "neither the script nor ssh is a rank"
    assert pids == [143944, 143992, 143993, 143997, 143961, 7]
    for odd in ("", "JobId=2 does not exist on node (null).", f"{HEAD}\n1 2 3\n{'9' * 30} 1 0 0 0\n0x1 1 0 0 0\n"):
        assert tasks.parse_listing(odd) == ({}, [])


def test_a_task_has_the_use_of_its_descendants_and_is_known_by_slurmstepd_alone(start: Callable[..., int]) -> None:
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    # It says that it is rank 7, by its environment and by its name.
    first = start(shell, SLURM_PROCID="7")
    second = start("open('/proc/self/comm', 'w').write(') R 1 7'); import time; time.sleep(600)", SLURM_PROCID="0")
    (child,) = until(lambda: children(first), "the child runs")
    until(lambda: Path(f"/proc/{second}/comm").read_text() == ") R 1 7\n", "it has its odd name")
    text = listing((first, "0", 0), (child, "0", None), (second, "0", 1), (os.getpid(), "extern", None))

    def rows() -> list[list[object]]:
        entry = tasks.compare(lambda: text, "/proc", PAUSE)
        assert entry["processes"] == 4
        found = entry["tasks"]
        assert isinstance(found, list)
        return found

    def is_seen() -> bool:
        (busy, idle) = rows()
        return busy[:2] == [0, 0] and idle[:4] == [0, 1, idle[2], 0] and float(str(busy[3])) > 0 < float(str(busy[2]))

    until(is_seen, "one task computes, the other does nothing", seen=rows)
    os.kill(second, signal.SIGSTOP)
    until(lambda: [row[4] for row in rows()] == ["", tasks.STOPPED], "the second is stopped", seen=rows)


def test_bytes_are_counted_for_the_task_that_wrote_them(start: Callable[..., int], disk: Path) -> None:
    write = "import time; open('file', 'wb').write(bytes(8 << 20)); open('done', 'w'); time.sleep(600)"
    writer, other = start(write), start("import time; time.sleep(600)")
    until((disk / "done").exists, "it has written")
    text = listing((writer, "0", 0), (other, "0", 1))
    entry = tasks.compare(lambda: text, "/proc", PAUSE)
    rows, written, rates = entry["tasks"], entry["bytes"], entry["bytes_a_second"]
    assert isinstance(rows, list) and isinstance(written, list) and isinstance(rates, list)
    assert rows[0][5] >= 8 << 20 and rows[1][5] == 0
    assert written[1] >= 8 << 20 and rates[1] == 0


def test_processes_that_end_while_they_are_read_are_left_out(start: Callable[..., int]) -> None:
    first, gone = start(SPIN), start(SPIN)
    texts = iter([listing((first, "0", 0), (gone, "0", 1)), listing((first, "0", 0), (gone, "0", 1))])

    def listed() -> str:
        text = next(texts)
        ended = subprocess.Popen(["true"])
        ended.wait()  # reaped: its number is no process any more
        return text.replace(f"{gone:<8}", f"{ended.pid:<8}")

    entry = tasks.compare(listed, "/proc", PAUSE)
    rows = entry["tasks"]
    assert isinstance(rows, list) and [row[1] for row in rows] == [0]
    assert tasks.compare(lambda: listing((1 << 33, "0", 0)), "/proc", 0.0)["tasks"] == []


def fake(
    proc: Path, pid: int, parent: int, ticks: int = 0, written: str = "write_bytes: 0\n", state: str = "S"
) -> None:
    """Write files as the kernel's; for what no real process can be made to have."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} (x) {state} {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 9\n")
    if written:
        (folder / "io").write_text(f"rchar: 1\nread_bytes: 0\n{written}")
    else:
        (folder / "io").mkdir(exist_ok=True)  # cannot be read


def test_a_job_of_ten_thousand_processes_is_counted_and_not_read(tmp_path: Path) -> None:
    fake(tmp_path, 2, 1)
    text = listing((2, "0", 0), *((pid, "0", None) for pid in range(3, 10_002)))
    assert tasks.compare(lambda: text, str(tmp_path), 0.0) == {"processes": 10_000}
    assert tasks.compare(lambda: " " * (tasks.MOST_LISTED + 1), str(tmp_path), 0.0) == {
        "processes": tasks.MOST_PROCESSES + 1
    }
    assert tasks.compare(lambda: "", str(tmp_path), 0.0) == {}
    with_many = listing(*((pid, "0", pid) for pid in range(2, 4000)))
    for pid in range(2, 400):
        fake(tmp_path, pid, 1)
    entry = tasks.compare(lambda: with_many, str(tmp_path), 0.0)
    assert len(entry["tasks"]) == tasks.MOST_TASKS  # type: ignore[arg-type]  # a list
    assert len(json.dumps(entry)) < black_box.LARGEST_LINE


def test_huge_numbers_circles_and_unreadable_files_give_a_line_that_can_be_read(tmp_path: Path) -> None:
    huge = f"write_bytes: {10**30}\n"
    fake(tmp_path, 2, 1, ticks=10**19, written=huge)
    fake(tmp_path, 3, 4)  # each the parent of the other
    fake(tmp_path, 4, 3)
    fake(tmp_path, 5, 1, written="")
    (tmp_path / "6").mkdir()
    (tmp_path / "6/stat").write_text("6 (x")
    text = listing((2, "0", 0), (3, "0", None), (4, "0", None), (5, "0", 1), (6, "0", 2))
    entry = tasks.compare(lambda: text, str(tmp_path), 0.0)
    rows = entry["tasks"]
    assert isinstance(rows, list) and [row[1] for row in rows] == [0, 1]
    assert rows[0][5] == tasks.LARGEST and rows[1][5] == -1
    assert "bytes" not in entry, "of one process it is not known"
    assert black_box.parse_lines(json.dumps({"kind": "now", **entry}).encode()), "no number is too large for the line"


def test_the_box_has_tasks_only_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path))
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001"}
    looks: list[int] = []

    def look() -> dict[str, object]:
        looks.append(1)
        return {"tasks": []}

    def lead() -> dict[str, object]:
        (entry,) = black_box.parse_lines(gpus.describe_now(black_box.find(12, 1001), tmp_path / "gpus.json", 1e9, look))
        assert isinstance(entry.pop("boot"), float)
        return entry

    assert lead() == {"kind": "now", "at": 1e9} and not looks, "another user's job has no box, and nobody looks at it"
    black_box.begin(job, 1e9)
    assert lead() == {"kind": "now", "at": 1e9, "tasks": []}
    black_box.end(job, 1e9)
    assert lead() == {"kind": "now", "at": 1e9} and len(looks) == 1
