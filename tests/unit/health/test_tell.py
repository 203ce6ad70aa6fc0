"""Results of a round as the pod, Prometheus and the table show them, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gitsync.errors import GitsyncError
from health.cli import exit_code, table
from health.tell import metrics, sentence
from health.verdict import Class, Finding, Result, Verdict, summarise, verdict_from_json

NOW = 1000.0
OK = Verdict("disk_space", Result.OK, Class.NODE, "fine", at=NOW - 5, expires=NOW + 60, boot_id="b")
BAD = replace(OK, check="gpu_ecc", result=Result.PROBLEM, class_=Class.REBOOT, reason='2 "errors"')
USER = replace(OK, check="load", result=Result.PROBLEM, class_=Class.USER, reason="high")
LOST = replace(OK, check="xid", result=Result.UNKNOWN)
ABSENT = replace(LOST, check="nvme", applies=False)


def by_name(*verdicts: Verdict) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in verdicts}


def test_the_sentence_names_problems_the_heaviest_first() -> None:
    assert sentence(by_name(OK, USER, BAD, LOST), NOW) == 'gpu_ecc (reboot): 2 "errors"; load (user): high'
    assert sentence(by_name(OK, LOST), NOW) == ""
    assert sentence(by_name(BAD), NOW + 61) == "", "out of date"


def test_metrics_are_what_prometheus_reads() -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(metrics(by_name(OK, BAD, LOST, ABSENT), NOW))
    }
    values = {sample.labels["check"]: sample.value for sample in families["minivm_health_verdict"].samples}
    assert values == {"disk_space": 0, "gpu_ecc": 1, "xid": 2}
    assert families["minivm_health_problems"].samples[0].value == 1
    assert families["minivm_health_verdict_at_seconds"].samples[0].value == NOW - 5


@pytest.mark.parametrize(
    ("verdicts", "code", "npd", "nhc"),
    [
        ([OK], 0, 0, 0),
        ([OK, ABSENT], 0, 0, 0),
        ([OK, USER], 1, 0, 0),
        ([OK, USER, LOST], 1, 2, 0),
        ([OK, LOST], 3, 2, 0),
        ([OK, LOST, BAD], 2, 1, 1),
        ([], 3, 2, 0),
        ([ABSENT], 3, 2, 0),
    ],
)
def test_exit_codes(verdicts: list[Verdict], code: int, npd: int, nhc: int) -> None:
    assert (exit_code(verdicts), exit_code(verdicts, "npd"), exit_code(verdicts, "nhc")) == (code, npd, nhc)


def test_the_table_has_colour_only_when_asked_for() -> None:
    assert "\x1b[31m" in table([OK, BAD], NOW, True)
    assert "\x1b" not in table([OK, BAD], NOW, False)


def test_the_worst_finding_stands_for_all() -> None:
    findings = [
        Finding(Result.OK, "a"),
        Finding(Result.UNKNOWN, "b"),
        Finding(Result.PROBLEM, "c", class_=Class.NODE),
        Finding(Result.PROBLEM, "d", class_=Class.RMA),
    ]
    worst = summarise(findings, Class.REBOOT)
    assert (worst.reason, worst.class_) == ("d (and 1 more)", Class.RMA)
    assert summarise([], Class.NODE).result is Result.UNKNOWN, "a check that says nothing proves nothing"


def test_a_verdict_survives_its_file() -> None:
    verdict = replace(BAD, findings=(Finding(Result.PROBLEM, "x", "GPU-1", Class.RMA, "1", "0"),))
    assert verdict_from_json(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    "change", [{"result": "fine"}, {"class": "x"}, {"at": "soon"}, {"findings": 3}, {"findings": [{}]}]
)
def test_a_damaged_verdict_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(GitsyncError, match="cannot read a verdict"):
        verdict_from_json({**BAD.to_json(), **change})


def test_a_verdict_is_fresh_within_its_time_and_its_boot() -> None:
    assert OK.fresh(NOW, "b")
    assert not OK.fresh(NOW + 60, "b")
    assert not OK.fresh(NOW, "c")
    assert not OK.fresh(NOW - 100, "b"), "a clock that jumped back"
