"""Metrics and logs."""

from __future__ import annotations

import re

from tests.conformance.adapter import Metrics
from tests.conformance.cluster import Cluster, name_of, not_offered

# Reads a page without a program that an image may not have.
GET = 'exec 3<>/dev/tcp/127.0.0.1/"$0" && printf "GET %s HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n" "$1" >&3 && cat <&3'
LINE = re.compile(r"[a-zA-Z_:][\w:]*(\{.*\})? [-+0-9.eEaNInf]+( \d+)?")


def page(cluster: Cluster, of: Metrics) -> list[str]:
    """Return the lines of a page of metrics."""
    whole = cluster.run_in(of.role, "bash", "-c", GET, str(of.port), of.path)
    head, _, body = whole.replace("\r\n", "\n").partition("\n\n")
    assert re.match(r"HTTP/1\.[01] 200", head), head
    return body.splitlines()


def test_the_pods_show_metrics(cluster: Cluster) -> None:
    """Each address of metrics answers, and shows what the adapter says of it."""
    if not cluster.adapter.metrics:
        not_offered("the adapter names no metrics")
    for of in cluster.adapter.metrics:
        lines = page(cluster, of)
        assert any(line.startswith(of.shows) for line in lines), f"{of}: {lines[:20]}"


def test_metrics_have_the_format_of_prometheus(cluster: Cluster) -> None:
    """Every line of the metrics is a comment or a sample that Prometheus reads."""
    if not cluster.adapter.metrics:
        not_offered("the adapter names no metrics")
    for of in cluster.adapter.metrics:
        lines = [line for line in page(cluster, of) if line and not line.startswith("#")]
        wrong = [line for line in lines if not LINE.fullmatch(line)]
        assert lines and not wrong, f"{of}: {wrong[:5]}"


def test_a_pods_log_has_what_its_daemon_says(cluster: Cluster) -> None:
    """`kubectl logs` of a pod has the lines of the Slurm daemon in it."""
    for daemon, role in cluster.adapter.daemons.items():
        for pod in cluster.pods(role):
            # A daemon's lines may come by a container of their own.
            done = cluster.attempt("logs", name_of(pod), "--all-containers", "--tail=4000")
            assert daemon in done.stdout, f"{name_of(pod)}: no line of {daemon} in {len(done.stdout)} characters"
