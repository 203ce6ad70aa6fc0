"""Metrics of health and gitsync on init's /metrics: valid, bounded, and without text of other authors."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gitsync import state
from gitsync.settings import GitsyncSettings
from gitsync.state import GitsyncState, Published, Quarantine
from health import tell as health_tell
from health.verdict import Class, Result, Verdict
from init.view import metrics

COMMIT = "9c01" * 10
STATE = GitsyncState(
    published=Published(COMMIT, 1.5, ref="branch main", signer="alice@example.org (ED25519 key x)", committed=1.0),
    quarantine=Quarantine("o", "c", "check", "gave up after password hunter2", 2.0, ""),
    failures=3, refused_total=4, published_total=5, durations={"fetch": 0.25}, last_error="password hunter2 refused",
)  # fmt: skip


def families(lines: list[str]) -> dict[str, object]:
    parsed = text_string_to_metric_families("\n".join([*lines, "# EOF"]) + "\n")  # type: ignore[no-untyped-call]
    return {family.name: family for family in parsed}


def samples(lines: list[str]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = families(lines).values()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in found
        for sample in family.samples  # type: ignore[attr-defined]  # the parser has no types
    }


def verdict(check: str, result: Result) -> Verdict:
    return Verdict(check=check, result=result, class_=Class.NODE, reason="password hunter2", at=1.0, expires=9e9)


def test_gitsyncs_own_file_is_valid_and_without_a_word() -> None:
    lines = metrics.open_metrics(state.render_metrics(STATE, GitsyncSettings(), time.time()), "minivm_gitsync_")
    found = samples(lines)
    assert found["minivm_gitsync_refused_total", ()] == 4 and found["minivm_gitsync_failures", ()] == 3
    info = (("commit", COMMIT), ("ref", "branch main"), ("ring", "rest"))
    assert found["minivm_gitsync_info", info] == 1
    assert found["minivm_gitsync_step_duration_seconds", (("step", "fetch"),)] == 0.25
    assert "hunter2" not in "\n".join(lines) and "alice" not in "\n".join(lines)


def test_healths_own_file_is_valid_and_without_a_word() -> None:
    text = health_tell.metrics({"xid": verdict("xid", Result.PROBLEM), "load": verdict("load", Result.OK)}, 2.0)
    lines = metrics.open_metrics(text, "minivm_health_")
    found = samples(lines)
    assert found["minivm_health_verdict", (("check", "xid"), ("class", "node"))] == 1
    assert found["minivm_health_problems", ()] == 1
    assert "hunter2" not in "\n".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "minivm_ready 1",  # PID 1's own metric
        "minivm_health_other 1",  # a metric of a family that was not declared
        "minivm_health_x nan",
        "minivm_health_x one",
        "minivm_health_x",
        "minivm_health_x 1 2",
        'minivm_health_x{check="a"',
        'minivm_health_x{check="a" 1',
        "minivm_health_x{} 1 # EOF",
        "# EOF",
        "",
    ],
)
def test_what_is_no_sample_of_the_services_own_is_left_out(line: str) -> None:
    text = f"# TYPE minivm_health_x gauge\n# TYPE minivm_ready gauge\n{line}\nminivm_health_x 7\n"
    assert samples(metrics.open_metrics(text, "minivm_health_")) == {("minivm_health_x", ()): 7.0}


def test_words_in_labels_do_not_pass() -> None:
    text = (
        "# TYPE minivm_health_x gauge\n"
        'minivm_health_x{check="a\\"} 1\\nminivm_ready 0",class="node"} 1\n'
        f'minivm_health_x{{check="{"y" * 200}",error="hunter2"}} 2\n'
        'minivm_health_x{check="b",check="c"} 3\n'
    )
    assert samples(metrics.open_metrics(text, "minivm_health_")) == {
        ("minivm_health_x", (("class", "node"),)): 1.0,
        ("minivm_health_x", ()): 2.0,
        ("minivm_health_x", (("check", "b"),)): 3.0,
    }


@given(st.text(alphabet='minvhealtgsyc_x{}=",\\ \n#TYPEgauge0159.e-', max_size=300))
def test_whatever_stands_there_the_answer_is_valid(text: str) -> None:
    declared = f"# TYPE minivm_health_x gauge\n# TYPE minivm_health_y_total counter\n{text}\nminivm_health_y_total 1\n"
    families(metrics.open_metrics(declared, "minivm_health_"))


def test_a_file_is_read_when_it_changes_and_only_if_it_is_roots_own_plain_and_small(tmp_path: Path) -> None:
    reader, path = metrics.Handed(str(tmp_path)), tmp_path / "health.prom"
    assert reader.lines() == [], "none was written yet"
    text = "# TYPE minivm_health_x gauge\nminivm_health_x {}\n"

    def written(value: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text.format(value))
        fresh.rename(path)

    written("1")
    assert reader.lines()[-1] == "minivm_health_x 1"
    written("2")
    assert reader.lines()[-1] == "minivm_health_x 2"
    path.chmod(0o666)
    assert reader.lines() == [], "anybody may write it"
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert reader.lines() == [], "somebody else's"
        os.chown(path, 0, 0)
    assert reader.lines()
    path.write_text(text.format("3") + "#" * metrics.LARGEST)
    assert reader.lines() == [], "too large"
    path.unlink()
    (tmp_path / "elsewhere").write_text(text.format("4"))
    path.symlink_to("elsewhere")
    assert reader.lines() == [], "a link"
    path.unlink()
    os.mkfifo(path)
    assert reader.lines() == [], "a pipe would be waited for"


def test_a_file_of_slurms_user_is_read_while_it_is_fresh(tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    path, reader = folder / "nodes.prom", metrics.Handed(str(tmp_path))
    path.write_text("# TYPE minivm_nodes_x gauge\nminivm_nodes_x 1\n# TYPE minivm_health_x gauge\nminivm_health_x 1\n")
    expected = ["# TYPE minivm_nodes_x gauge", "minivm_nodes_x 1"]
    assert reader.lines() == expected
    if os.geteuid() == 0:
        os.chown(path, 64030, 64030)
        assert reader.lines() == [], "the directory is not that user's"
        os.chown(folder, 64030, 64030)
        assert reader.lines() == expected
        os.chown(path, 20001, 20001)
        assert reader.lines() == []
        os.chown(path, 64030, 64030)
    old = time.time() - metrics.FRESH_S - 1
    os.utime(path, (old, old))
    assert reader.lines() == [], "its writer does not run, or does not know"
    os.utime(path)
    assert reader.lines() == expected
