"""The chart's dashboards: each query is one that Prometheus takes, and each of Slurm's finds what slurmctld serves."""

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

RECORDED = ROOT / "tests" / "recordings" / "slurm-metrics" / "26.05.txt"
OPERATORS, CAPACITY, RESEARCHERS = "minivm.json", "minivm-capacity.json", "minivm-researchers.json"
# The recording's cluster has no GPU, and nobody's jobs use one.
WITHOUT_GPUS = {"GPUs in use", "GPUs in use, by user"}


def dashboards(slurm: dict[str, Any]) -> dict[str, dict[str, Any]]:
    values = {"grafanaDashboard": {"enabled": True}, "slurm": slurm}
    (data,) = [
        item["data"]
        for item in render(values, release="slurm", namespace="hpc")
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "slurm-dashboard"
    ]
    return {name: json.loads(text) for name, text in data.items()}


ALL = dashboards({"metrics": True, "version": "26.05"})


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each panel's title with each of its queries, as Grafana sends them for alice."""
    return [
        (panel["title"], target["expr"].replace("$namespace", "hpc").replace("$user", "alice"))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def test_dashboards_of_slurm_s_own_metrics_come_with_these() -> None:
    assert set(ALL) == {OPERATORS, CAPACITY, RESEARCHERS}
    assert set(dashboards({})) == {OPERATORS}


@pytest.mark.parametrize("name", sorted(ALL))
def test_panels_have_ids_of_their_own_and_lie_beside_each_other(name: str) -> None:
    panels = ALL[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 5
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    variables = {item["name"] for item in ALL[name]["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(ALL[name]))) == variables


@pytest.mark.parametrize("name", sorted(ALL))
def test_prometheus_takes_each_query(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rules.yaml"
    rules = [{"record": f"panel:{number}", "expr": query} for number, (_, query) in enumerate(queries(ALL[name]))]
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0 and f"{len(rules)} rules found" in checked.stdout, checked.stdout + checked.stderr


def recorded() -> list[dict[str, str]]:
    """Return the recording as promtool's series, with the label that the scrape adds."""
    series = []
    for line in RECORDED.read_text().splitlines():
        if sample := re.fullmatch(r"(\w+)(?:\{(.*)\})? (\d+)", line):
            name, labels, value = sample.groups()
            series.append(
                {"series": f'{name}{{namespace="hpc"{"," + labels if labels else ""}}}', "values": f"{value}x5"}
            )
    return series


@pytest.mark.parametrize("name", [CAPACITY, RESEARCHERS])
def test_each_query_finds_something_in_what_slurmctld_serves(tmp_path: Path, name: str) -> None:
    """promtool is told to expect nothing of a query, and reports each that answers."""
    asked = [query for title, query in queries(ALL[name]) if title not in WITHOUT_GPUS]
    looks = [{"expr": query, "eval_time": "1m", "exp_samples": []} for query in asked]
    path = tmp_path / "tests.yaml"
    tests = [{"interval": "1m", "input_series": recorded(), "promql_expr_test": looks}]
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    report = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    answered = set(re.findall(r'expr: "(.*?)", time:', report.stdout + report.stderr))
    assert {query.replace('"', '\\"') for query in asked} == answered, report.stdout + report.stderr
