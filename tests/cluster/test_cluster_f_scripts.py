"""An operator tries scripts of his own on the cluster of this machine, by the page that says how."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.researcher import World
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/add-a-health-check.md"
WORKERS = ("slurm-worker-0", "slurm-worker-1")
# Where the page's blocks belong, in its order.
FILES = (
    ("python", "health.d/fans.py"),
    ("json", "lib/thresholds/fans.json"),
    ("text", "health.d/recordings/fan-stands/sensors.txt"),
    ("json", "health.d/recordings/fan-stands/case.json"),
)


def blocks() -> list[tuple[str, str]]:
    """The page's fenced blocks, their indentation in a list taken away."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", PAGE.read_text(), re.M | re.S)
    return [(kind, re.sub(rf"^{pad}", "", text, flags=re.M)) for pad, kind, text in found]


def commands(world: World, scripts: Path) -> Iterator[str]:
    for kind, text in blocks():
        if kind == "":
            for line in text.splitlines():
                here = line.removeprefix("$ ").replace("/tmp/my-scripts", str(scripts))
                here = here.replace("minivm-local-", f"minivm-{world.cluster.options.name}-")
                yield here.replace("build.py scripts", f"build.py scripts --name {world.cluster.options.name}")


def test_the_page_add_a_health_check_as_it_is_written(healthy: World, tmp_path: Path) -> None:
    scripts = tmp_path / "my-scripts"
    contents = [(kind, text) for kind, text in blocks() if kind]
    assert [kind for kind, _ in contents[: len(FILES)]] == [kind for kind, _ in FILES]
    copy, selftest, take, health, back = commands(healthy, scripts)

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout + done.stderr

    assert run(copy)[0] == 0
    for (_, name), (_, text) in zip(FILES, contents, strict=False):
        (scripts / name).parent.mkdir(parents=True, exist_ok=True)
        (scripts / name).write_text(text)
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
