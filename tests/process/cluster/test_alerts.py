"""The chart's alerts in Prometheus' own promtool: each fires when it has to, and no other time."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.reader import ROOT
from tests.support.rendered_chart import PROMTOOL, render

NAMESPACE = "hpc"
LABELS = 'namespace="hpc",app_kubernetes_io_instance="slurm",pod="slurm-x-0"'
READY = "minivm_ready{" + LABELS + ',app_kubernetes_io_component="%s",minivm_io_pool="gpu"}'
DAY = 24 * 60


def one(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {name + "{" + LABELS + (f",{labels}" if labels else "") + "}": values}


def ready(component: str, values: str) -> dict[str, str]:
    return {READY % component: values}


def workers(*values: str) -> dict[str, str]:
    return {(READY % "worker").replace("x-0", f"x-{index}"): text for index, text in enumerate(values)}


def rates(*values: str) -> dict[str, str]:
    """Series of one active check on nodes of one pool."""
    series = {}
    for index, value in enumerate(values):
        (name,) = one("minivm_health_active_bytes_per_second", "", 'check="tcp",minivm_io_pool="gpu"')
        series[name.replace("x-0", f"x-{index}")] = f"{value}x60"
    return series


def nodes(**counts: int) -> dict[str, str]:
    return {
        name: f"{count}x99"
        for state, count in counts.items()
        for name in one("minivm_nodes_by_state", "", f'state="{state}"')
    }


def blamed(part: str, values: str) -> dict[str, str]:
    return one("minivm_active_blamed", values, f'check="tcp",name="rack-1",part="{part}"')


# Alert: the minute, series (Prometheus' notation, a sample a minute) by which it fires then, and by which it does not.
CASES: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {
    "MinivmUnseen": (10, {}, ready("worker", "0x20")),
    "MinivmControllerNotReady": (10, ready("controller", "1x3 0x20"), ready("controller", "1x3 0 1x20")),
    "MinivmControllerTookOver": (
        40, one("minivm_controller_term", "3x30 4x40"), one("minivm_controller_term", "3 4x60"),
    ),
    "MinivmControllersAlternate": (
        90, one("minivm_controller_term", "3x10 4x10 5x10 7x80"), one("minivm_controller_term", "3x10 4x10 6x80"),
    ),
    "MinivmAccountingNotReady": (20, ready("accounting", "1x3 0x20"), ready("accounting", "1x3 0 1x40")),
    "MinivmNoLoginReady": (10, ready("login", "0x20"), ready("login", "1x20")),
    "MinivmWorkersNotReady": (20, workers("0x30", *["1x30"] * 8), workers("0x30", *["1x30"] * 9)),
    "MinivmPodNotReady": (40, ready("worker", "0x60"), ready("worker", "0x20 1 0x60")),
    "MinivmServiceFails": (
        20,
        one("minivm_service_failures_total", "0+1x30", 'service="slurmd"'),
        one("minivm_service_failures_total", "0x8 1x3 2x20", 'service="slurmd"'),
    ),
    "MinivmLogsLost": (30, one("minivm_log_lost_bytes_total", "0x10 7x30"), one("minivm_log_lost_bytes_total", "7x40")),
    "MinivmStateUnproven": (
        3 * DAY + 120,
        one("minivm_state_proven_timestamp_seconds", "0x96") | one("minivm_uptime_seconds", "0+3600x96"),
        # The pod is young: the first copy is still to come.
        one("minivm_state_proven_timestamp_seconds", "0x96") | one("minivm_uptime_seconds", "9x96"),
    ),
    "MinivmCertificateEnds": (
        40,
        one("minivm_keys_certificate_end_timestamp_seconds", "1209700x60", 'file="sssd/ca.crt"'),
        one("minivm_keys_certificate_end_timestamp_seconds", "1213200x60", 'file="sssd/ca.crt"'),
    ),
    "MinivmKeyOld": (
        366 * DAY,
        one("minivm_keys_known_timestamp_seconds", f"0x{366 * 24}", 'key="munge key"'),
        one("minivm_keys_known_timestamp_seconds", f"172800x{366 * 24}", 'key="munge key"'),
    ),
    "MinivmMessagesWait": (
        40, one("minivm_notify_up", "0x60", 'channel="mail"'), one("minivm_notify_up", "0x20 1 0x20", 'channel="mail"'),
    ),
    "MinivmScriptsRefused": (20, one("minivm_gitsync_quarantined", "1x30"), one("minivm_gitsync_quarantined", "0x30")),
    "MinivmScriptsStale": (20, one("minivm_gitsync_age_seconds", "4000x30"), one("minivm_gitsync_age_seconds", "9x30")),
    "MinivmNodeProblem": (20, one("minivm_health_problems", "1x30"), one("minivm_health_problems", "1x9 0 1x30")),
    "MinivmNodeSlow": (40, rates("7", "6", "7", "7", "4"), rates("7", "6", "7", "7", "5")),
    "MinivmNodesDrained": (40, nodes(drained=2, idle=3, busy=14), nodes(drained=2, idle=3, busy=15)),
    "MinivmJobsWaitBesideIdleNodes": (
        95,
        one("minivm_active_startable_jobs", "0x10 4x30 0x5 1x60", 'partition="gpu"'),
        one("minivm_active_startable_jobs", "0x10 4x40 0x20 1x40", 'partition="gpu"'),
    ),
    "MinivmSwitchBlamed": (10, blamed("leaf", "3x20"), blamed("machine", "3x20") | blamed("leaf", "0x20")),
    "MinivmRunnerMissed": (
        20, one("minivm_runner_missed_total", "0+1x30"), one("minivm_runner_missed_total", "0x10 1x30"),
    ),
    "MinivmFleetIdle": (10, one("minivm_fleet_leader", "0x20"), one("minivm_fleet_leader", "1x20")),
    "MinivmFleetBlind": (
        10,
        one("minivm_fleet_leader", "1x20") | one("minivm_fleet_known", "0x20", 'side="slurm"'),
        # One that waits for the Lease may not know Kubernetes either, and does nothing anyway.
        one("minivm_fleet_leader", "0x20") | one("minivm_fleet_known", "0x20", 'side="kubernetes"'),
    ),
    "MinivmFleetMistake": (10, one("minivm_fleet_decided", "0x20"), one("minivm_fleet_decided", "1x20")),
    "MinivmFleetWaitsForYou": (
        10,
        one("minivm_fleet_stands", "1x20", 'kind="propose"'),
        one("minivm_fleet_stands", "5x20", 'kind="waits"'),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    (found,) = [
        item for item in render(values, release="slurm", namespace=NAMESPACE) if item["kind"] == "PrometheusRule"
    ]
    assert found["metadata"]["labels"]["release"] == "prometheus"
    path = tmp_path_factory.mktemp("alerts") / "rules.json"
    path.write_text(json.dumps(found["spec"]))
    return path


def fired(rules: Path, minute: int, series: dict[str, str]) -> set[str]:
    """Return the alerts that fire at that minute, by promtool's report of what it did not expect."""
    alerts = [rule["alert"] for group in json.loads(rules.read_text())["groups"] for rule in group["rules"]]
    looks = [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []} for alert in alerts]
    # Days in steps of an hour: promtool evaluates each rule at each step.
    step = "1h" if minute > DAY else "1m"
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests: list[dict[str, Any]] = [{"interval": step, "input_series": given, "alert_rule_test": looks}]
    path = rules.with_name("tests.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": step, "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert ("FAILED" if done.returncode else "SUCCESS") in said, said
    found = set(re.findall(r"alertname: (\w+)", said))
    assert bool(found) == bool(done.returncode), said
    return found


def test_prometheus_understands_the_alerts(rules: Path) -> None:
    done = subprocess.run([PROMTOOL, "check", "rules", str(rules)], capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(CASES)} rules found" in done.stdout, done.stdout + done.stderr
    groups = json.loads(rules.read_text())["groups"]
    assert [rule["alert"] for group in groups for rule in group["rules"]] == list(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_has_to(rules: Path, alert: str) -> None:
    minute, bad, good = CASES[alert]
    assert alert in fired(rules, minute, bad)
    assert alert not in fired(rules, minute, good)


def test_a_proof_that_failed_is_told_at_once(rules: Path) -> None:
    series = one("minivm_state_proof_failed", "1x30") | ready("controller", "1x30")
    assert fired(rules, 20, series) == {"MinivmStateUnproven"}


def test_a_healthy_cluster_fires_nothing(rules: Path) -> None:
    series = ready("controller", "1x99") | ready("login", "1x99") | workers("1x99")
    for _, _, good in CASES.values():
        # Not those of pods that were unready for a while, or are young.
        series |= good if not any(re.match("minivm_(ready|state_|uptime)", name) for name in good) else {}
    series |= one("minivm_fleet_leader", "1x99") | one("minivm_fleet_known", "1x99", 'side="kubernetes"')
    assert fired(rules, 60, series) == set()


def test_a_login_pool_that_is_ready_hides_no_pool_that_is_not(rules: Path) -> None:
    other = {(READY % "login").replace("gpu", "login").replace("x-0", "x-1"): "1x20"}
    assert fired(rules, 10, ready("login", "0x20") | other) == {"MinivmNoLoginReady"}


def test_each_source_of_a_certificate_is_told(rules: Path) -> None:
    for source, labels in (("scim", ""), ("fleet", 'file="webhook/ca.crt"'), ("keys", 'file="sssd/ca.crt"')):
        series = one(f"minivm_{source}_certificate_end_timestamp_seconds", "9x30", labels) | ready("worker", "1x30")
        assert fired(rules, 20, series) == {"MinivmCertificateEnds"}


def test_a_standby_that_is_ready_hides_no_controller_that_is_not(rules: Path) -> None:
    standby = {(READY % "controller").replace("x-0", "x-1"): "1x20"}
    assert "MinivmControllerNotReady" in fired(rules, 10, ready("controller", "0x20") | standby)


def test_another_release_in_the_namespace_is_not_this_one(rules: Path) -> None:
    other = {name.replace('"slurm"', '"other"'): values for name, values in ready("controller", "1x20").items()}
    assert fired(rules, 10, other) == {"MinivmUnseen"}


def test_the_alerts_ask_for_metrics_that_exist() -> None:
    asked = set(re.findall(r"\bminivm_(?!io_)\w+(?=[{ ])", (ROOT / "cluster/chart/files/alerts.yaml").read_text()))
    sources = "".join(
        path.read_text() for top in ("init", "fleet", "gitsync", "health") for path in (ROOT / top).rglob("*.py")
    )
    for name in asked:
        short = name.removeprefix("minivm_").removesuffix("_total")
        named = (f'"{name}', f'"{name.removesuffix("_total")}"', f'"{short}"', f'"{short.removeprefix("gitsync_")}"')
        assert any(text in sources for text in named), name
