"""The pages' own commands, as written and in order: a page that lies fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import World
from tests.pages import Block, blocks

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# What a reader's kubectl does, for this machine's pods. It knows what the pages use of it, and nothing else.
KUBECTL = """#!/bin/sh
set -eu
[ "$1" = exec ] && shift
interactive=
if [ "$1" = -i ]; then interactive=-i; shift; fi
pod=$1; [ "$2" = -- ]; shift 2
exec docker exec $interactive "minivm-$MINIVM_NAME-$pod" "$@"
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of somebody who follows a page: a cluster of his own name, the images of this run."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"image": {"repository": IMAGES}}))
    env = os.environ | {"MINIVM_NAME": f"{NAME}-reader", "MINIVM_VALUES": str(values)}
    env["PATH"] = f"{kubectl.parent}:{env['PATH']}"
    yield env
    subprocess.run([".venv/bin/python", "build.py", "down"], cwd=ROOT, env=env, check=False, timeout=120)


def follow(block: Block, env: Mapping[str, str], directory: Path = ROOT) -> str:
    """Type it, and be told where the page is wrong. Who logs in gets what is typed there by `make ssh`."""
    done = subprocess.run(
        ["make", "-s", "ssh"] if block.user else ["bash", "-o", "pipefail", "-s"],
        cwd=directory, env=dict(env), input=block.script, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"docs/{block.page}:{block.line}: exit {done.returncode}\n{block.text}\n{said}"
    return said


def test_the_tutorial_can_be_followed(reader: Mapping[str, str]) -> None:
    said = {block.line: follow(block, reader) for block in blocks(DOCS / "tutorial.md") if block.runs}
    everything = "\n".join(said.values())
    assert "slurm-worker-1: ready after" in everything
    assert "COMPLETED" in everything and everything.count("slurm-worker-0\n") >= 2, "srun's answers and the job's file"
    assert not list((ROOT / "build" / "cluster").glob(f"{NAME}-reader")), "nothing is left"


@pytest.mark.parametrize("page", ["how-to/operate-a-pod.md", "how-to/add-a-user.md"])
def test_an_operators_page_can_be_followed(
    healthy: World, reader: Mapping[str, str], tmp_path: Path, page: str
) -> None:
    env = dict(reader) | {"MINIVM_NAME": healthy.cluster.options.name}
    for block in blocks(DOCS / page):
        if block.runs:
            follow(block, env, tmp_path)  # the page's own files must not stay in the repository
