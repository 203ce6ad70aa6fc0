"""The chart rendered for a new cluster, and for a cluster on one machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import manifests, values
from cluster import render as chart_render
from cluster.manifests import Manifests
from cluster.render import CHART, Document
from cluster.values import NAMESPACE, RELEASE, Keys, Options, merge

PROMTOOL = shutil.which("promtool") or str(Path(__file__).resolve().parents[2] / "build/tools/promtool")
KEYS = Keys(
    ring="cmlu" * 12,
    slurm="c2x1" * 12,
    munge="bXVu" * 12,
    jwt="and0" * 12,
    database="secret",
    ssh_host={"ssh_host_ed25519_key": "PRIVATE"},
    ssh_host_public="ssh-ed25519 AAAA",
    worker_host={"ssh_host_ed25519_key": "OTHER"},
    worker_host_public="ssh-ed25519 BBBB",
    users={},
    users_public={"alice": "ssh-ed25519 AAAA alice", "bob": "ssh-ed25519 BBBB bob"},
)


def new(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with a new cluster's authentication, unless they name one: a render sees no cluster."""
    return merge({"slurm": {"auth": "slurm"}}, values)


def render(values: Mapping[str, Any], *, release: str, namespace: str) -> list[Document]:
    return chart_render.render(new(values), release=release, namespace=namespace)


def render_texts(values: Mapping[str, Any], *, release: str, namespace: str, chart: Path = CHART) -> dict[str, str]:
    return chart_render.render_texts(new(values), release=release, namespace=namespace, chart=chart)


def local(options: Options | None = None) -> Manifests:
    chosen = values.local_values(options or Options(), KEYS)
    return manifests.parse(chart_render.render(chosen, release=RELEASE, namespace=NAMESPACE), namespace=NAMESPACE)
