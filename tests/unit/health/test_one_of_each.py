"""Code that two programs of a node share exists once, and both use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gitsync.tree.admit import list_kinds
from gitsync.tree.check import is_script as is_checked
from health.ledger import Ledger, read_book
from health.policy import broker_policy, runner_policy
from health.rounds import Index, Listed, read_index, write_index
from init.errors import ConfigError

HEALTH = Path(__file__).resolve().parents[3] / "health"


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(HEALTH.rglob("*.py")):
        yield str(path.relative_to(HEALTH)), path.read_text()


@pytest.mark.parametrize("ending", ["~", ".md", ".txt", ".json", ".yaml", ".yml", ".toml", ".conf", ".example"])
def test_what_the_runner_does_not_run_gitsync_does_not_ask_to_be_executable(ending: str) -> None:
    assert is_checked("prolog.d/10-x") and list_kinds(["prolog.d/10-x"])
    assert not is_checked(f"prolog.d/10-x{ending}") and not list_kinds([f"prolog.d/10-x{ending}"])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("random/boot_id", {"places.py"}),
        ('"MINIVM_VERDICTS"', {"places.py"}),
        ('"MINIVM_HEALTH_STATE"', {"places.py"}),
        ("index.json", {"places.py"}),
        ("class Verdict", {"verdict.py"}),
        ("policy.json", {"places.py", "policy.py"}),
        ("NOTIFY_SOCKET", set()),
        ("uname().nodename", {"checks/round.py"}),
        ("sha256(", {"verdict.py", "policy.py"}),
        # `ground` publishes files; the exceptions rename a capsule's directory, rotate the record's log, close a box,
        # and name a job's capsule, which replaces no file.
        (".rename(", {"black_box.py", "checks/cases.py", "jobs/boxes.py", "runner/record.py"}),
        ("write_text(", {"checks/cases.py"}),
    ],
)
def test_one_module_knows_it(text: str, where: set[str]) -> None:
    assert {name for name, source in modules() if text in source} == where


@pytest.mark.parametrize("read", [runner_policy, broker_policy])
def test_a_section_that_nobody_knows_is_told_to_each_reader_of_the_policy(read: object) -> None:
    with pytest.raises(ConfigError, match="did you mean 'broker'"):
        read({"brokr": {"clear_after": 3}}, "policy.json")  # type: ignore[operator]  # one of two functions


def test_a_mistake_in_the_other_s_section_costs_nothing() -> None:
    assert broker_policy({"runner": {"prolog": 5}, "broker": {"clear_after": 3}}, "policy.json").clear_after == 3
    assert runner_policy({"gate": {"wait_s": 1}, "broker": {"guard": 5}}, "policy.json").gate_wait_s == 1


def test_a_book_that_an_older_pod_has_kept_is_read_and_goes_on(tmp_path: Path) -> None:
    event = {"at": 50.0, "check": "xid", "class": "reboot", "reason": "x", "node": "w-1", "evidence": "/capsules/1"}
    book = {"uuid": "GPU-1", "serial": "165", "model": "H100", "events": [event], "offender": False, "site": "kept"}
    (tmp_path / "GPU-1.json").write_text(json.dumps(book))
    again = {**event, "at": 60.0, "evidence": "/capsules/2"}
    assert Ledger(tmp_path).enter("GPU-1", again, since=0.0, most=2) == 2
    after = read_book(tmp_path / "GPU-1.json")
    assert after == {**book, "events": [event, again], "offender": True}
    Ledger(tmp_path).forgive("GPU-1", 70.0)
    assert Ledger(tmp_path).incidents("GPU-1", 0.0) == 0
    assert read_book(tmp_path / "GPU-1.json")["offender"] is False


def test_the_index_is_read_as_it_was_written_and_as_older_rounds_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    listed = {
        "one": Listed(frozenset({"prolog", "epilog"}), 60.0, True),
        "two": Listed(frozenset({"boot"}), 5.0, False),
    }
    index = Index("c" * 40, "boot", listed, "/tree", 1.0, {"gpu": "8"}, frozenset({"typo"}))
    write_index(path, index)
    assert read_index(path) == index
    assert index.checks == {"one", "two", "typo"} and index.with_jobs == {"one"}
    older = json.loads(path.read_text())
    del older["broken"], older["expect"]
    path.write_text(json.dumps(older))
    assert read_index(path) == Index("c" * 40, "boot", listed, "/tree", 1.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"commit": "c", "boot_id": "b", "checks": {"one": 5}}', "[" * 10**5])
def test_a_damaged_index_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    assert read_index(tmp_path / "index.json") is None
