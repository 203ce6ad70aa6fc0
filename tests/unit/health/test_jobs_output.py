"""Errors in a job's own output: which line is named, of which rank, and what is never read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from health.jobs import output
from health.jobs.model import Answer, Job, JobCause, Sure
from tests.support.ways import DEAD, RUNNING, WAITING, WAYS, table

ROOT = Path(__file__).resolve().parents[3]
NOW = 1_800_000_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    fail()\n'


def job(code: int = 1, **more: object) -> Job:
    facts: dict[str, object] = {
        "id": 12, "shown": "12", "user": "alice", "states": frozenset({"FAILED"}), "exit_code": code,
        "started": NOW - 100, "ended": NOW,
    } | more  # fmt: skip
    return Job(**facts)  # type: ignore[arg-type]  # a table of fields


def line(text: str, code: int = 1) -> str:
    said = output.find(text, "/out", job(code))
    return said.line if said else ""


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        (f"{TRACEBACK}ModuleNotFoundError: No module named 'x'", 1, JobCause.CODE),
        (f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, JobCause.REQUEST),
        (f"{TRACEBACK}MemoryError", 1, JobCause.REQUEST),
        (f"{TRACEBACK}OSError: [Errno 28] No space left on device: 'x'", 1, JobCause.LIMIT),
        (f"{TRACEBACK}OSError: [Errno 122] Disk quota exceeded", 1, JobCause.LIMIT),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, JobCause.MACHINE),
        ("script: line 3: module: command not found", 127, JobCause.CODE),
        ("./a: error while loading shared libraries: libx.so.1: cannot open shared object file", 1, JobCause.CODE),
        ("thread 'main' panicked at src/main.rs:2:5:", 101, JobCause.CODE),
    ],
)
def test_a_line_has_its_cause_and_none_is_certain(text: str, code: int, cause: JobCause) -> None:
    said = output.find(f"start\n{text}\nafter it\n", "/out", job(code))
    assert said is not None and said.line == text.splitlines()[-1]
    answer = output.add(Answer("It ended.", JobCause.CODE), said, job(code))
    assert answer.cause is cause and answer.headline.startswith(f"It ended. It wrote: {said.line}")
    assert answer.sure is not Sure.CERTAIN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk that is full")
def test_a_full_disk_is_named_where_the_output_names_no_error(tmp_path: Path) -> None:
    """The last words of a program are lost on a full disk: an empty output is no sign of its code."""
    own = Answer("It ended.", JobCause.CODE)
    failed = job(output=str(tmp_path / "out"))
    assert output.add_full_disk(own, failed) == own, "room is left"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], check=True)
    try:
        fill = subprocess.run(["dd", "if=/dev/zero", f"of={tmp_path}/out", "bs=4k"], capture_output=True, check=False)
        assert fill.returncode == 1 and b"No space left" in fill.stderr
        answer = output.add_full_disk(own, failed)
        assert answer.cause is JobCause.LIMIT and "disk of its output is full" in answer.headline
        assert answer.advice[0].startswith("make room")
        for kept in (Answer("It ended.", JobCause.MACHINE), Answer("It ended.", JobCause.LIMIT)):
            assert output.add_full_disk(kept, failed) == kept
        timed_out = job(output=failed.output, states=frozenset({"TIMEOUT"}))
        assert output.add_full_disk(own, timed_out) == own
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_shell_s_message_counts_only_with_the_exit_code_that_it_explains() -> None:
    assert line("line 1: module: command not found\n", code=1) == ""
    assert line("line 1: module: command not found\n", code=127)


def test_an_error_that_was_handled_is_not_the_last_one() -> None:
    text = f"{TRACEBACK}KeyError: 'a'\nDuring handling of the above exception\n{TRACEBACK}ValueError: b\nbye\n"
    assert line(text) == "ValueError: b"
    assert line("all is well\nno error: here\n") == ""


def test_the_rank_that_wrote_first_is_named_and_what_follows_from_it_is_not() -> None:
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'x'\n"
        "w0:12:34 [0] NCCL WARN Call failed\n[rank0]:[E1] Watchdog caught collective operation timeout\n"
        "[rank1]: ValueError: bad batch\n[rank1]: BrokenPipeError: [Errno 32] Broken pipe\n"
        "[rank2]: Traceback (most recent call last):\n[rank2]: KeyError: 3\n"
        f"{TRACEBACK}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    said = output.find(text, "/out", job())
    assert said is not None and (said.rank, said.line) == (1, "ValueError: bad batch")
    answer = output.add(Answer("It ended.", JobCause.CODE), said, job())
    assert answer.headline == "It ended. First rank 1 wrote: ValueError: bad batch."
    said = output.find("w0:12:34 [0] NCCL WARN Call failed\n", "/out", job())
    assert said is not None and (said.node, said.rule.cause) == ("w0", JobCause.UNKNOWN)


def test_what_the_machine_or_a_limit_did_stays_so_whatever_the_output_says() -> None:
    said = output.find(f"{TRACEBACK}KeyError: 1\n", "/out", job())
    for cause in (JobCause.MACHINE, JobCause.LIMIT, JobCause.PERSON):
        answer = output.add(Answer("It ended.", cause), said, job())
        assert (answer.headline, answer.cause, len(answer.evidence)) == ("It ended.", cause, 1)
    late = output.add(Answer("It ended.", JobCause.UNKNOWN), said, job(states=frozenset({"TIMEOUT"})))
    assert late.headline == "It ended."


def test_only_the_end_of_an_own_plain_file_of_this_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("x: command not found\n")
    assert output.read(job(127, output=str(path), started=path.stat().st_mtime)) is not None
    assert output.read(job(127, output=str(path), started=path.stat().st_mtime + 60)) is None
    requeue = "slurmstepd: error: *** JOB 12 ON w0 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n"
    path.write_text(f"x: command not found\n{requeue}fine\n")
    assert output.read(job(127, output=str(path), started=0)) is None
    note = "minivm: job 12 failed: why\nminivm: evidence and what to do: minivm job 12\n"
    path.write_text(f"x: command not found\n{note}")
    assert output.read(job(127, output=str(path), started=0)) is not None
    path.write_text("x: command not found\n" + "." * output.MOST_READ)
    assert output.read(job(127, output=str(path), started=0)) is None
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "fifo", tmp_path, tmp_path / "absent", "/dev/zero", "a\0b"):
        assert output.read(job(127, output=str(odd), started=0)) is None


def test_a_hostile_line_is_made_safe_and_short() -> None:
    said = output.find("\x1b[31mx\x1b]0;y\x07" + "z" * 9000 + "\n" + "\x1b[2Ja: command not found\n", "/out", job(127))
    assert said is not None and said.line.isprintable() and len(said.line) <= 200


def test_the_page_of_the_ways_shows_each_way_of_the_real_test() -> None:
    text = (ROOT / "docs/reference/forty-ways.md").read_text()
    assert text.partition("<!-- ways: begin -->\n")[2].partition("<!-- ways: end -->")[0] == table()
    assert len(WAYS) >= 40 and min(map(len, (DEAD, WAITING, RUNNING))) > 3
    assert sum(way.nodes == 2 for way in WAYS) > 5
