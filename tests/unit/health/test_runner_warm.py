"""Decisions of the resident runner on text and files: requests, plans, what it keeps, and what a prolog trusts."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from gitsync.layout import Layout
from health.places import Places, boot_id
from health.policy import RunnerPolicy, ScriptPolicy
from health.rounds import Index, Listed, write_index
from health.runner import gate, plan, record, warm, worker
from health.runner.server import CHECK_DELAY_S, CHECK_PAUSE_S, CheckAfterJobs, RunnerServer
from health.runner.warm import FileCache
from health.runner.worker import LONGEST_REQUEST, encode_end, parse
from health.verdict import Class, Result, Verdict, write_verdict

NONE = "[Errno 11] Resource temporarily unavailable"


def test_a_request_is_a_line_and_variables() -> None:
    text = b"minivm 1 prolog 28\nSLURM_JOB_ID=42\0A=b=c\0X\0=y\0\0"
    assert parse(text[:30]) is None, "more is to come"
    found = parse(text)
    assert found is not None
    assert (found.kind, dict(found.environment)) == ("prolog", {"SLURM_JOB_ID": "42", "A": "b=c"})


@pytest.mark.parametrize(
    "text",
    [
        b"x" * 64,
        b"minivm 2 prolog 0\n",
        b"minivm 1 task_prolog 0\n",
        b"minivm 1 prolog -1\n",
        b"minivm 1 prolog 0\nmore",
        b"minivm 1 prolog 3\nA=1",
        b"minivm 1 prolog %d\n" % (LONGEST_REQUEST + 1),
        b"minivm 1 pr\xc3\xb6log 0\n",
    ],
)
def test_what_is_no_request_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_an_answer_has_the_end_of_what_was_said() -> None:
    assert encode_end(1, b"why\n") == b"\x01\x04\x00why\n"
    assert len(encode_end(0, b"x" * 100_000)) < 2**16


def test_a_plan_says_what_it_rests_on_and_each_script_s_limits(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "sync", tmp_path / "zero")
    policy = RunnerPolicy(scripts={"task_prolog.d/20-b": ScriptPolicy(1.5, "fail")})
    text = plan.render(layout, "", [("/policy", "-")], "zero", policy, {"10-a": "", "20-b": "ABOUT"})
    assert text == (
        "minivm task_prolog 2\n"
        f"link\t{tmp_path}/sync/current\t\nsame\t/policy\t-\n"
        f"commit\tzero\ntree\t{tmp_path}/zero\nbudget\t8000\n"
        "scripts\n10-a\t3000\tcontinue\t\n20-b\t1500\tfail\tABOUT\nend\n"
    )
    for name in ("10-a\t", "10\nend"):
        assert plan.render(layout, "", [], "zero", policy, {name: ""}) is None


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("#!/bin/sh\n# minivm: only with SLURM_X\nexit 0\n", "SLURM_X"),
        ("#!/bin/sh\nexit 0\n", ""),
        ("#!/bin/sh\n# minivm: only with two words\n", ""),
        ("#!/bin/sh\n# minivm: only with A\tfail\n", ""),
        ("#!/bin/sh\n# minivm: only with \u00e9\n", ""),
        ("# " + "x" * 4000 + "\n# minivm: only with LATE\n", ""),
    ],
)
def test_what_a_script_is_about_is_one_name_in_its_first_lines(tmp_path: Path, text: str, variable: str) -> None:
    (tmp_path / "script").write_text(text)
    assert plan.only_with(tmp_path / "script") == variable
    assert plan.only_with(tmp_path / "absent") == ""


def test_what_was_read_is_read_again_when_the_file_is_another(tmp_path: Path) -> None:
    kept, file = FileCache(), tmp_path / "file"

    def look() -> str | None:
        kept.look()
        return kept.get("file", [file], lambda: file.read_text() if file.exists() else None)

    assert look() is None
    file.write_text("one")
    assert look() == "one"
    (tmp_path / "next").write_text("two")
    (tmp_path / "next").rename(file)
    assert look() == "two"
    file.unlink()
    assert look() is None


def test_after_a_job_a_prolog_looks_at_gpus_itself_and_believes_the_host_s_verdicts(tmp_path: Path) -> None:
    places = Places(tmp_path / "verdicts", tmp_path / "state")
    (tmp_path / "health.d").mkdir()
    both = frozenset({"prolog", "epilog", "background"})
    listed = {
        "disk": Listed(both, 60, True, "any"),
        "gpu": Listed(both, 60, True, "gpu"),
        "clocks": Listed(both - {"epilog"}, 60, True, "gpu"),
    }
    write_index(places.index, Index("zero", boot_id(), listed, str(tmp_path)))
    now = time.time()
    for name in listed:
        verdict = Verdict(name, Result.OK, Class.NODE, "fine", boot_id=boot_id(), at=now, expires=now + 60)
        write_verdict(places.verdicts, verdict)
    assert gate.look("prolog", tmp_path, "zero", places).complete
    found = gate.look("prolog", tmp_path, "zero", places, after_a_job=True)
    assert (found.stale, sorted(found.believed)) == (("gpu",), ["clocks", "disk"])


def test_looks_after_jobs_are_apart_and_owed_until_one_is_over() -> None:
    after = CheckAfterJobs(Places())
    assert not after.is_owed
    after.owe(100.0)
    after.owe(100.5)
    assert after.is_owed and not after.is_due(100.9) and after.is_due(100.0 + CHECK_DELAY_S)
    after.set_fork(7, 101.0)
    assert after.is_owed and not after.is_due(102.0), "it is under way"
    after.owe(102.0)
    after.note_end(8, 0, 103.0)
    after.note_end(7, 0, 103.0)
    assert after.is_owed and not after.is_due(103.0)
    assert after.times() == [101.0 + CHECK_PAUSE_S]
    after.set_fork(9, 111.0)
    assert after.note_end(9, signal.SIGKILL, 131.0), "which is told"
    assert after.is_owed and after.times() == [131.0 + CHECK_PAUSE_S], (
        "one that was cut has not looked; not at once again"
    )
    after.set_fork(10, 141.0)
    assert not after.note_end(10, signal.SIGKILL, 161.0), "and told once"
    after.set_fork(11, 171.0)
    after.note_end(11, 0, 172.0)
    assert not after.is_owed
    after.owe(200.0)
    after.set_fork(12, 201.0)
    assert after.note_end(12, 1 << 8, 202.0) and after.times() == [202.0 + CHECK_PAUSE_S], "nor has one that failed"


def test_a_fork_whose_work_failed_or_was_stopped_says_so() -> None:
    def failed() -> None:
        raise ValueError("a bug")

    def stopped() -> None:
        raise warm.Stopped

    ends = [os.waitpid(worker.fork(work), 0)[1] for work in (lambda: None, failed, stopped)]
    assert list(map(os.waitstatus_to_exitcode, ends)) == [0, 1, 1]


def test_a_look_for_which_there_is_no_process_is_owed_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(work: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    told: list[str] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        try:
            server = RunnerServer(listener, Places(), Layout(tmp_path, tmp_path), told.append)
            monkeypatch.setattr(server, "read_ahead", lambda: None)
            server.after.owe(time.monotonic() - 60)
            monkeypatch.setattr(worker, "fork", none)
            server.turn()
            assert server.after.is_owed and server.after.times()[0] > time.monotonic(), "with a pause"
            assert server.after.put_off(time.monotonic() - 60) is False
            server.turn()
            assert told == ["cannot check the node after a job, retrying: " + NONE]
            server.after.put_off(time.monotonic() - 60)
            monkeypatch.setattr(worker, "fork", lambda work: 7)
            server.turn()
            assert not server.after.times() and server.after.is_owed, "it is under way"
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def test_what_a_run_asks_for_is_looked_at_once_also_by_its_fork(tmp_path: Path) -> None:
    kept, one, two = FileCache(), tmp_path / "one", tmp_path / "two"

    def read(file: Path) -> str:
        return kept.get(file, [file], file.read_text)

    for file in (one, two):
        file.write_text("before")
        assert read(file) == "before"
    kept.look()
    assert read(one) == "before"
    for file in (one, two):
        file.write_text("afterwards")
    assert (read(one), read(two)) == ("before", "afterwards")


def test_a_line_of_the_record_waits_for_nobody_until_the_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    path = tmp_path / "runs.jsonl"
    path.touch()
    with path.open() as file:
        # Another run that writes at the same moment holds this lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        assert record.append({"job": "1"})
        assert (path.read_text(), waits) == ('{"job":"1"}\n', [])
        monkeypatch.setattr(record, "RUNS_LIMIT", 1)
        assert record.append({"job": "2"})
    assert waits, "only one turns it over"
    assert path.read_text() == '{"job":"1"}\n{"job":"2"}\n'
