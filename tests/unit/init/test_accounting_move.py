"""Which records may go into which database, and when slurmdbd starts with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from init.errors import ConfigError
from init.pod.pod import Pod
from init.records import replace
from init.state import move
from init.state.move import IN, LOADING, OUT, MoveError, RecordsHead, RecordsMark

HEAD = RecordsHead("site", 42, "t2", ("t1", "t2"), {"site_job_table": 5, "acct_table": 1}, 1000)
EMPTY: dict[str, int] = {}
JOBS = {"site_job_table": 3}


@pytest.mark.parametrize(
    ("what", "mark", "head", "counts"),
    [
        ("a new database", RecordsMark(), HEAD, EMPTY),
        ("one that slurmdbd has only made its tables in", RecordsMark(), HEAD, {"site_job_table": 0}),
        ("the former place, whose records these contain", RecordsMark(OUT, "t1", ("t1",)), HEAD, JOBS),
        ("a load that was cut", RecordsMark(LOADING, "t2", ("t1", "t2")), HEAD, JOBS),
        ("a load that was cut, and the records were written anew", RecordsMark(LOADING, "t0", ("t0",)), HEAD, JOBS),
        ("a load into the former place that was cut", RecordsMark(LOADING, "t2", ("t1", "t2"), "t1"), HEAD, JOBS),
    ],
)
def test_records_go_where_none_is_lost(what: str, mark: RecordsMark, head: RecordsHead, counts: dict[str, int]) -> None:
    move.check_target(mark, head, counts, "site")


@pytest.mark.parametrize(
    ("mark", "head", "counts", "reason"),
    [
        (RecordsMark(), replace(HEAD, cluster="other"), EMPTY, "they are of the cluster other, and this is site"),
        (RecordsMark(), HEAD, {"other_job_table": 1}, "other clusters use the database, too: other"),
        (RecordsMark(OUT, "t1", ("t1",)), HEAD, {"other_job_table": 1}, "other clusters use the database, too: other"),
        (RecordsMark(), HEAD, JOBS, "it has 3 jobs of its own"),
        (RecordsMark(IN, "t1", ("t1",)), HEAD, EMPTY, "the database is in use"),
        (RecordsMark(OUT, "t2", ("t1", "t2")), HEAD, JOBS, "they were written here"),
        (
            RecordsMark(OUT, "t3", ("t1", "t2", "t3")),
            HEAD,
            JOBS,
            "do not contain the records that were moved out of here",
        ),
        (RecordsMark(LOADING, "t2", ("t1", "t2"), "t3"), HEAD, JOBS, "do not contain the records"),
        (RecordsMark(LOADING, "t2", ("t1", "t2"), "t2"), HEAD, JOBS, "they were written here"),
    ],
)
def test_records_that_would_replace_others_are_refused(
    mark: RecordsMark, head: RecordsHead, counts: dict[str, int], reason: str
) -> None:
    with pytest.raises(MoveError) as caught:
        move.check_target(mark, head, counts, "site")
    assert reason in str(caught.value)


def test_the_first_line_comes_back_as_it_was_written() -> None:
    assert move.head_of_line(move.line_of(HEAD)) == HEAD


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"-- MariaDB dump 10.19\n",
        move.line_of(HEAD)[:-1],
        move.line_of(HEAD)[:-9] + b"\n",
        move.line_of(replace(HEAD, token="")),
        move.line_of(replace(HEAD, cluster="a`; DROP")),
        move.line_of(replace(HEAD, counts={"a": -1})),
        move.line_of(replace(HEAD, counts={"a`": 1})),
        move.line_of(HEAD).replace(b'"version": 1', b'"version": 2'),
        move.line_of(HEAD).replace(b'"size": 1000', b'"size": "x"'),
        move.line_of(HEAD).replace(b'"size": 1000', b'"site": 1000'),
    ],
)
def test_another_first_line_is_refused(line: bytes) -> None:
    with pytest.raises(MoveError, match="cannot load the records: "):
        move.head_of_line(line)


def test_a_difference_names_the_table() -> None:
    assert move.difference({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert move.difference({"a": 1, "b": 2}, {"a": 1, "b": 1}) == "b has 1 rows, expected 2"
    assert move.difference({"a": 1}, {}) == "a has no rows, expected 1"


@pytest.mark.parametrize("accounting", ["embedded", "external"])
def test_slurmdbd_starts_only_with_the_records(accounting: str, tmp_path: Path) -> None:
    here, waiting = (
        Pod({"MINIVM_ACCOUNTING": accounting, "MINIVM_ACCOUNTING_FROM": origin}, tmp_path) for origin in ("", "pod")
    )
    assert move.guard(here) == "its records were always here"
    with pytest.raises(ConfigError, match="it waits for the records of the pod database"):
        move.guard(waiting)
    file = move.mark_file(here)
    for phase, reason in ((OUT, "were moved out on 1970-01-01"), (LOADING, "a load of its records was cut"), (IN, "")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"phase": phase, "token": "t1", "history": ["t1"], "replaces": "", "time": 0}))
        for pod in (here, waiting):
            if not reason:
                assert move.guard(pod) == "its records were moved in"
                continue
            with pytest.raises(ConfigError, match=reason):
                move.guard(pod)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": "gone", "history": []}', '{"phase": "moved-in"}'])
def test_a_damaged_mark_starts_nothing(text: str, tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    move.mark_file(pod).parent.mkdir(parents=True)
    move.mark_file(pod).write_text(text)
    with pytest.raises(ConfigError, match="the mark is damaged"):
        move.guard(pod)


@pytest.mark.parametrize("accounting", ["pod", "none"])
def test_a_pod_without_slurmdbd_moves_nothing(accounting: str, tmp_path: Path) -> None:
    with pytest.raises(MoveError, match="run this in the pod that has slurmdbd"):
        move.mark_file(Pod({"MINIVM_ACCOUNTING": accounting}, tmp_path))
