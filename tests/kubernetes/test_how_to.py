"""docs/how-to/install-on-kubernetes.md as written, by somebody who has a directory and a machine without GPUs."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.kubectl import Kubernetes
from tests.kubernetes.world import Release
from tests.pages import Block, blocks
from tests.reader import ROOT, checkout, follow, programs
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)
PAGE = ROOT / "docs" / "how-to" / "install-on-kubernetes.md"
LAST = "helm uninstall slurm -n slurm"


@pytest.fixture
def reader(kubernetes: Kubernetes, tmp_path: Path) -> Mapping[str, str]:
    """Who types `kubectl` gets the one of this Kubernetes."""
    directory = programs(tmp_path / "bin")
    (directory / "kubectl").write_text(f'#!/bin/sh\nexec {" ".join(kubernetes.client)} "$@"\n')
    path = f"{directory}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "KUBECONFIG": str(kubernetes.kubeconfig)}


def test_the_page_is_followed_from_nothing_to_a_job_and_taken_back(
    kubernetes: Kubernetes, reader: Mapping[str, str], tmp_path: Path
) -> None:
    release = Release(kubernetes, tmp_path, namespace="slurm")
    directory = checkout(tmp_path / "checkout")
    page = blocks(PAGE)
    users = next(yaml.safe_load(block.text) for block in page if block.kind == "values" and "secrets" in block.text)
    (secret,) = (
        item for item in release.rendered() if item["kind"] == "Secret" and item["metadata"]["name"] == "slurm-sssd"
    )
    (directory / "sssd.conf").write_bytes(base64.b64decode(secret["data"]["sssd.conf"]))
    release.over = users
    (directory / "values.yaml").write_text(yaml.safe_dump(release.values()))
    typed = [block for block in page if block.kind in ("runs", "needs kubernetes")]
    # Where the namespace is somebody's already this fails, and nothing of his is touched.
    follow(typed[0], reader, directory)
    try:
        said = [steps(release, block, reader, directory) for block in typed[1:]]
        assert "slurmctld" in said[-1]
        nodes = [f"{release.name}-worker-{number}" for number in (0, 1)]
        assert sorted(release.as_user("alice", "srun -N2 hostname").split()) == nodes
        release.shut()
        assert LAST in PAGE.read_text()
        follow(Block(PAGE.name, 0, LAST), reader, directory)
        until(lambda: not release.pods(), "the pods are gone", within=180, seen=release.why)
        assert set(release.secrets()) >= {"slurm-key", "jwt", "ssh-host-keys", "database"}
        kept = {item["metadata"]["name"] for item in release.get("pvc")["items"]}
        assert {"slurm-home", "state-slurm-controller-0"} <= kept
    finally:
        release.shut()
        kubernetes("delete", "namespace", release.namespace, "--wait=false")


def steps(release: Release, block: Block, reader: Mapping[str, str], directory: Path) -> str:
    """Who has installed waits until it is there."""
    said = follow(block, reader, directory)
    if "helm install" in block.text:
        release.wait_ready()
    return said
