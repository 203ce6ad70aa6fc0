"""Which records may go into which database, and when slurmdbd starts with one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from init.accounting_cli import ProgressWriter
from init.errors import ConfigError
from init.lean import fields, replace
from init.pod.pod import Pod
from init.slurm.accounting import CONFIGURATION as SLURMDBD
from init.slurm.place import CONFIGURATION
from init.state import move
from init.state.move import IN, LOADING, OUT, MoveError, RecordsHead, RecordsMark

HEAD = RecordsHead("site", 42, "t2", ("t1", "t2"), {"site_job_table": 5, "acct_table": 1}, 1000)
EMPTY: dict[str, int] = {}
JOBS = {"site_job_table": 3}
NEWER = replace(HEAD, counts={**HEAD.counts, "new_table": 1})
# As slurmdbd 26.05 makes it, with the cluster that slurmctld registers there.
FRESH = {"acct_table": 1, "convert_version_table": 1, "qos_table": 1, "table_defs_table": 11, "tres_table": 9,
         "user_table": 1, "cluster_table": 1, "txn_table": 2, "site_assoc_table": 2, "site_job_table": 0}  # fmt: skip
FORMER = RecordsMark(OUT, "t1", ("t1",))


@pytest.mark.parametrize(
    ("what", "mark", "head", "counts"),
    [
        ("a new database", RecordsMark(), HEAD, EMPTY),
        ("one that slurmdbd has only made its tables in", RecordsMark(), HEAD, FRESH),
        ("one with a table of a Slurm that only the writer knew", RecordsMark(LOADING), NEWER, {"new_table": 1}),
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
        (RecordsMark(), HEAD, {"other_assoc_table": 0}, "other clusters use the database, too: other"),
        (FORMER, HEAD, {"site_b_assoc_table": 2}, "other clusters use the database, too: site_b"),
        (RecordsMark(), HEAD, FRESH | {"wp_posts": 0}, "tables that are not slurmdbd's: wp_posts"),
        (FORMER, HEAD, FRESH | {"site_posts": 9}, "tables that are not slurmdbd's: site_posts"),
        (RecordsMark(LOADING, "t2"), HEAD, {"site_`x_table": 0}, "tables that are not slurmdbd's: site_`x_table"),
        (RecordsMark(), HEAD, FRESH | {"acct_table": 2}, "did not make itself, in acct_table"),
        (
            RecordsMark(),
            HEAD,
            FRESH | {"user_table": 2, "qos_table": 3},
            "did not make itself, in qos_table, user_table",
        ),
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
    assert move.head_of_line(move.format_line(HEAD)) == HEAD


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"-- MariaDB dump 10.19\n",
        move.format_line(HEAD)[:-1],
        move.format_line(HEAD)[:-9] + b"\n",
        move.format_line(replace(HEAD, token="")),
        move.format_line(replace(HEAD, cluster="a`; DROP")),
        move.format_line(replace(HEAD, counts={"a": -1})),
        move.format_line(replace(HEAD, counts={"a`": 1})),
        move.format_line(HEAD).replace(b'"version": 1', b'"version": 2'),
        move.format_line(HEAD).replace(b'"size": 1000', b'"size": "x"'),
        move.format_line(HEAD).replace(b'"size": 1000', b'"site": 1000'),
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


class FakeDatabase:
    """A database whose tables change between two looks, as slurmdbd changes them."""

    place = "db.site:3306/slurm_acct_db"

    def __init__(self, *counts: dict[str, int]) -> None:
        self.looks, self.cleared = list(counts), set[str]()

    def counts(self) -> dict[str, int]:
        return self.looks.pop(0)

    def clear(self, tables: Iterable[str]) -> None:
        self.cleared |= {*tables}


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    """A pod with slurmdbd of an external database, whose PID 1 starts and stops services by name only."""
    states = {"slurmdbd": "ready"}

    def stop(what: str) -> bool:
        ran, states["slurmdbd"] = states["slurmdbd"] == "ready", "stopped"
        return ran

    def start() -> dict[str, str]:
        states["slurmdbd"] = "ready"
        return {"state": "ready"}

    monkeypatch.setattr(move, "_states", lambda: states)
    monkeypatch.setattr(move, "_stop", stop)
    monkeypatch.setattr(move, "_request_start", start)
    monkeypatch.setattr(move, "WITHIN", 0.0)
    pod = Pod({"MINIVM_ACCOUNTING": "external"}, tmp_path)
    for path, text in ((CONFIGURATION, "ClusterName=site\n"), (SLURMDBD, "StorageHost=DB.site\n"), (move.LOCK, "")):
        pod.path(path).parent.mkdir(parents=True, exist_ok=True)
        pod.path(path).write_text(text)
    return pod


def marked(pod: Pod, mark: RecordsMark) -> Pod:
    file = move.mark_file(pod)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields(mark)))
    return pod


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize(("mark", "origin"), [(RecordsMark(LOADING, "t1"), ""), (RecordsMark(), "embedded")])
def test_a_move_is_given_up_without_the_database_that_failed(mark: RecordsMark, origin: str, external: Pod) -> None:
    if mark.phase:
        marked(external, mark)
    pod = Pod({**external.env, move.FROM: origin}, external.root)
    with pytest.raises(move.NothingHere):
        move.move_out(pod, io.BytesIO(), silent)


def test_records_that_came_during_the_first_look_are_not_dropped(
    external: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = FakeDatabase(FRESH, FRESH | {"site_job_table": 1})
    monkeypatch.setattr(move, "database", lambda _: base)
    with pytest.raises(MoveError, match="it has 1 job of its own"):
        move.move_in(external, io.BytesIO(move.format_line(HEAD)), silent)
    assert not base.looks and not base.cleared
    assert move.read_mark(move.mark_file(external)) == RecordsMark()
    assert move._states()["slurmdbd"] == "ready", "it records on"


def test_a_load_drops_what_it_checked_and_writes_down_the_database(
    external: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = FakeDatabase(EMPTY, FRESH, {**HEAD.counts})
    monkeypatch.setattr(move, "database", lambda _: base)
    monkeypatch.setattr(move, "_load", lambda *_: None)
    move.move_in(external, io.BytesIO(move.format_line(HEAD)), silent)
    assert base.cleared == FRESH.keys()
    mark = move.read_mark(move.mark_file(external))
    assert (mark.phase, mark.place) == (IN, base.place)


def test_the_settings_must_name_the_database_of_the_last_move(external: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    text = external.path(SLURMDBD).read_text()
    assert move.database_of(text).place == FakeDatabase.place
    assert move.database_of("StorageHost=localhost\nStorageLoc=x\n").place == ""
    base = FakeDatabase(JOBS)
    monkeypatch.setattr(move, "database", lambda *_, **__: base)
    reason = "the last move was in the database old:3306/slurm_acct_db, and the settings name db.site:3306"
    for phase in (OUT, IN):
        marked(external, RecordsMark(phase, "t1", ("t1",), place="old:3306/slurm_acct_db"))
        with pytest.raises(MoveError, match=reason):
            move.move_in(external, io.BytesIO(move.format_line(HEAD)), silent)
        with pytest.raises(MoveError, match=reason):
            move.move_out(external, io.BytesIO(), silent)
    marked(external, replace(FORMER, place="old:3306/slurm_acct_db"))
    with pytest.raises(MoveError, match=reason):
        move.reopen(external)
    marked(external, replace(FORMER, place=base.place))
    move.reopen(external)
    assert move.read_mark(move.mark_file(external)).place == base.place


def test_a_standby_reopens_nothing(external: Pod) -> None:
    """The mark is on the volume of both controllers, and slurmdbd starts in the active one alone."""
    move._states()["lease"] = "starting"
    marked(external, FORMER)
    with pytest.raises(MoveError, match="this controller stands by"):
        move.reopen(external)
    assert move.read_mark(move.mark_file(external)) == FORMER


def test_tables_of_others_are_not_written_out(external: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    base = FakeDatabase(FRESH | {"wp_posts": 1})
    monkeypatch.setattr(move, "database", lambda _: base)
    with pytest.raises(MoveError, match="not slurmdbd's: wp_posts"):
        move.move_out(external, io.BytesIO(), silent)
    assert move.read_mark(move.mark_file(external)) == RecordsMark()


def test_views_and_strange_names_are_listed_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def sql(self: move.RecordsDatabase, statement: str) -> list[str]:
        if "information_schema" in statement:
            return ["a_table\tBASE TABLE", "seen\tVIEW", "it's `odd\tBASE TABLE"]
        assert "odd" not in statement and "seen" not in statement
        return ["a_table\t7"]

    monkeypatch.setattr(move.RecordsDatabase, "sql", sql)
    assert move.RecordsDatabase("", (), "").counts() == {"a_table": 7, "seen": 0, "it's `odd": 0}


def test_a_closed_database_tells_both_ways_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        move.guard(marked(Pod({}, tmp_path), FORMER))
    assert "move-in` here" in str(caught.value)
    assert "if no place loaded them: `minivm accounting reopen`" in str(caught.value)


def test_a_reader_that_takes_nothing_ends_the_writing() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="the reader of the records took nothing"):
            ProgressWriter(writer, within=0.1).write(bytes(1 << 21))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_reader_that_takes_all_gets_all() -> None:
    reader, writer = os.pipe()
    data = os.urandom(1 << 20)
    with ThreadPoolExecutor() as pool, os.fdopen(reader, "rb") as source:
        taken = pool.submit(source.read)
        ProgressWriter(writer).write(data)
        os.close(writer)
        assert taken.result() == data
