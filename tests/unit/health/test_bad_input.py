"""Wrong input to `minivm health`, `replay` and `ledger`: one-sentence errors that name the file and the field."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from gitsync.errors import GitsyncError
from health import cli as health_cli
from health.api import Check, CheckModule, Class, Inputs, Limits, ok, problem
from health.checks.cases import read_case
from health.checks.judge import Setting, judge
from health.checks.load import load_checks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "wanted a mapping"),
        (b'{"wanted": {}}', "unknown key 'wanted'"),
        (b'{"expect": 5}', "case.json, expect"),
        (b'{"expect": {"load": "odd"}}', "wanted ok, problem or unknown, optionally with a class, not 'odd'"),
        (b'{"previous": {"load": 5}}', "case.json, previous.load"),
        (b'{"environment": []}', "case.json, environment"),
        (b'{"now": "today"}', "wanted seconds since 1970, not 'today'"),
    ],
)
def test_a_case_that_is_none_is_told_by_file_and_field(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "case.json").write_bytes(text)
    with pytest.raises(GitsyncError) as caught:
        read_case(tmp_path)
    assert told in str(caught.value) and str(tmp_path / "case.json") in str(caught.value)


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_a_file_that_is_no_capsule_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    cut = packed(tmp_path / "cut.tar.gz", {"c/case.json": b"{}" * 10_000})
    cut.write_bytes(cut.read_bytes()[:-40])
    for file in (junk, cut):
        assert health_cli.main(["replay", str(file)]) == 3
        assert f"neither a directory nor a packed one (.tar.gz) ({file})" in capsys.readouterr().err


def test_a_capsule_that_would_fill_the_disk_is_not_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_cli, "UNPACKED_LIMIT", 1 << 20)
    bomb = packed(tmp_path / "bomb.tar.gz", {"c/case.json": b"{}", "c/a.txt": bytes(2 << 20)})
    assert health_cli.main(["replay", str(bomb)]) == 3
    assert "it holds more than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a mapping"),
        ('{"about": "x", "perod_s": 5}', "unknown key 'perod_s'; known: about, class"),
        ("{}", "wanted a sentence"),
        ('{"about": "x", "class": "odd"}', "wanted one of user, node, reboot, manual, rma, not 'odd'"),
        ('{"about": "x", "class": []}', "scratch, class"),
        ('{"about": "x", "when": "boot"}', "wanted a list of prolog, background"),
        ('{"about": "x", "when": ["never"]}', "scratch, when"),
        ('{"about": "x", "period_s": "5m"}', "wanted seconds, not '5m'"),
        ('{"about": "x", "deadline_s": 0}', "scratch, deadline_s"),
    ],
)
def test_the_header_of_a_program_is_read_field_by_field(tmp_path: Path, header: str, told: str) -> None:
    (tmp_path / "health.d").mkdir()
    program = tmp_path / "health.d/scratch"
    program.write_text(f"#!/bin/sh\n# minivm-check: {header}\n")
    program.chmod(0o755)
    assert told in load_checks(tmp_path).broken["scratch"]


@pytest.mark.parametrize("tree", ["nowhere", "file"])
def test_a_selftest_of_nothing_is_no_success(tmp_path: Path, tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert health_cli.main(["selftest", str(tmp_path / tree)]) == 3
    assert "it has no directory health.d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "not JSON"),
        ("[]", "wanted a mapping"),
        ('{"events": 5}', "wanted a list of incidents"),
        ('{"events": [{"at": "noon", "check": "a", "reason": "b"}]}', "wanted a list of incidents"),
        ('{"events": [{"at": 1e300, "check": "a", "reason": "b"}]}', "wanted a list of incidents"),
    ],
)
def test_a_damaged_book_of_the_ledger_is_told_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    monkeypatch.setenv("MINIVM_LEDGER", str(tmp_path))
    (tmp_path / "GPU-a.json").write_text(text)
    event = {"at": 1.7e9, "check": "xid", "reason": "fell off the bus"}
    (tmp_path / "GPU-b.json").write_text(json.dumps({"uuid": "GPU-b", "model": "H100", "events": [event]}))
    assert health_cli.main(["ledger"]) == 3
    out, err = capsys.readouterr()
    assert told in err and "GPU-a.json" in err
    assert "GPU-b  H100" in out and "xid: fell off the bus" in out
    assert health_cli.main(["ledger", "--forgive", "GPU-a"]) == 3
    assert (tmp_path / "GPU-a.json").read_text() == text


@pytest.mark.parametrize(("option", "known"), [("--when", "background"), ("--class", "reboot")])
def test_a_wrong_choice_is_told_with_the_right_ones(
    capsys: pytest.CaptureFixture[str], option: str, known: str
) -> None:
    with pytest.raises(SystemExit):
        health_cli.main(["health", option, "never"])
    err = capsys.readouterr().err
    assert "'never' is not one of" in err and known in err


class Nasty:
    """Check whose text comes from a user: a process may have any name."""

    CHECK = Check(name="nasty", about="", class_=Class.NODE, period_s=60, sources=(), thresholds="")

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def parse(self, inputs: Inputs) -> None:
        """Read nothing."""

    def judge(self, measured: None, context: object) -> object:
        return [problem(self.reason, subject="a\x1b[1m", measured="\r7"), ok("fine")]


def test_a_verdict_carries_nothing_that_a_terminal_would_obey() -> None:
    module: CheckModule = Nasty("\x1b]0;owned\x07held by a\nb\u202e")  # type: ignore[assignment]  # its types are wider
    verdict = judge(module, {}, lambda _: Limits({}, ""), Setting("c", "b", 1.0, {}), {}).verdict
    words = [verdict.reason, verdict.subject, verdict.measured, *(found.reason for found in verdict.findings)]
    assert all(word.isprintable() for word in words)
    assert "held by a b" in verdict.reason
