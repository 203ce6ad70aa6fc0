"""An operator tries scripts of his own on the cluster of this machine, by the page that says how."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.researcher import World
from tests.pages import blocks
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/add-a-health-check.md"
WORKERS = ("slurm-worker-0", "slurm-worker-1")
# Tried in a tree of its own, by tests/unit/test_pages.py: there is no /scratch in a pod.
ANOTHER = "health.d/scratch.sh"


def commands(world: World, scripts: Path) -> Iterator[str]:
    for block in blocks(PAGE):
        if block.runs:
            for line in block.text.splitlines():
                here = line.removeprefix("$ ").replace("/tmp/my-scripts", str(scripts))
                here = here.replace("minivm-local-", f"minivm-{world.cluster.options.name}-")
                yield here.replace("build.py scripts", f"build.py scripts --name {world.cluster.options.name}")


def test_the_page_add_a_health_check_as_it_is_written(healthy: World, tmp_path: Path) -> None:
    scripts = tmp_path / "my-scripts"
    copy, selftest, take, health, back = commands(healthy, scripts)

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout + done.stderr

    assert run(copy)[0] == 0
    for block in blocks(PAGE):
        if block.file and block.file != ANOTHER:
            (scripts / block.file).parent.mkdir(parents=True, exist_ok=True)
            (scripts / block.file).write_text(block.text)
    code, said = run(selftest)
    assert code == 0 and "checks load" in said and "no recording here is sick for: " in said, said
    assert "fans" not in said, "its recording is sick"
    code, said = run(take)
    assert code == 0 and all(f"{pod}: taken" in said for pod in WORKERS), said
    code, said = run(health)
    assert code == 3 and "fans" in said and "unknown" in said, said
    # What does not run is refused by every pod, with the reason, and the last good tree stays.
    (scripts / "health.d/fans.py").write_text("def broken(:\n")
    code, said = run(take)
    assert code == 1 and all(
        f"{pod}: refused: cannot run the commit's scripts: health.d/fans.py" in said for pod in WORKERS
    )
    assert "fans" in run(health)[1], "the last good tree stays"
    code, said = run(back)
    assert code == 0, said

    def degraded() -> list[str]:
        return [text for pod in WORKERS for text in healthy.row(pod).also if "scripts" in text]

    until(lambda: not degraded(), "nothing is refused any more", seen=degraded)


def test_a_job_cannot_push_to_what_runs_as_root(healthy: World) -> None:
    """The repository's port is open to every job, and its commits are not signed."""
    steps = (
        "set -e; rm -rf /tmp/p; export HOME=/tmp; git clone -q git://slurm-demo/scripts /tmp/p; cd /tmp/p;"
        " git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x; git push -q origin HEAD:main"
    )
    code, said = healthy.cluster.exec("slurm-worker-0", ["bash", "-c", steps], user="nobody")
    assert code != 0 and "access denied or repository not exported" in said, said
