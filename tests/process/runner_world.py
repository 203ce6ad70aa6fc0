"""A node's places in a temporary directory, and the runner as slurmd would start it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import until

LAUNCH = "from health.runner.run import main; raise SystemExit(main({kind!r}))"


ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "images/src/runner"


@dataclass(slots=True)
class World:
    root: Path
    environment_extra: dict[str, str] = field(default_factory=dict)
    # The programs that slurm.conf names, made for these places; without them a run is a Python of its own.
    clients: Path | None = None

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/nowhere",
            "SECRET_OF_SLURMD": "1",
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_UID": "61234",
            "MINIVM_GITSYNC_ROOT": str(self.root / "sync"),
            "MINIVM_GITSYNC_ZERO": str(self.tree),
            "MINIVM_LOG": str(self.root / "log"),
            "MINIVM_VERDICTS": str(self.root / "verdicts"),
            "MINIVM_HEALTH_STATE": str(self.root / "health"),
            "MINIVM_CAPSULES": str(self.root / "capsules"),
            "MINIVM_BROKER": str(self.root / "broker.sock"),
            "MINIVM_BROKER_STATE": str(self.root / "broker.json"),
            "MINIVM_LEDGER": str(self.root / "ledger"),
            "MINIVM_HEALTH_METRICS": str(self.root / "health.prom"),
            "MINIVM_CONTROL": str(self.root / "control.sock"),
            "MINIVM_BOX_PORT": "0",
            "MINIVM_RUNNER": str(self.root / "runner"),
            "MINIVM_RUNNER_PLAN": str(self.root / "task_prolog.plan"),
            **self.environment_extra,
        }

    def script(self, name: str, text: str, mode: int = 0o755) -> Path:
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def policy(self, **data: object) -> None:
        self.script("lib/policy.json", json.dumps(data), 0o644)

    def start(self, kind: str, **extra: str) -> subprocess.Popen[str]:
        alone = [sys.executable, "-I", "-c", LAUNCH.format(kind=kind)]
        return subprocess.Popen(
            [str(self.clients / kind)] if self.clients else alone,
            env={**self.environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, kind: str, **extra: str) -> tuple[int, str, str]:
        process = self.start(kind, **extra)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def records(self) -> list[dict[str, Any]]:
        path = self.root / "log/runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verdict(self, name: str) -> Mapping[str, Any]:
        return dict(json.loads((self.root / f"verdicts/{name}.json").read_text()))


def compile_clients(world: World, patience_ms: int | None = 60_000) -> None:
    """Compile the clients as the image's layer does, except for the places and for how long they wait for the runner.

    On a busy machine a runner that is well may take a run later than the image's clients wait: 0.2 s after a missed
    run. None leaves their times as they are.
    """
    world.clients = world.root / "clients"
    world.clients.mkdir(exist_ok=True)
    text, source = (SOURCES / "client.c").read_text(), world.root / "client.c"
    if patience_ms is not None:
        text, count = re.subn(r"(#define (?:IM)?PATIENCE_MS) \d+", rf"\1 {patience_ms}", text)
        assert count == 2
    source.write_text(text)
    places = {"FOLDER": world.root / "runner", "PLAN": world.root / "task_prolog.plan", "PYTHON": sys.executable}
    gcc = ["gcc", "-std=c17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIE", "-pie"]
    gcc += [f'-D{name}="{value}"' for name, value in places.items()]
    for kind in ("prolog", "epilog", "health"):
        made = [f'-DKIND="{kind}"', "-o", str(world.clients / kind), str(source)]
        subprocess.run([*gcc, *made], check=True)
    made = [f"-DOWNER={os.getuid()}", "-o", str(world.clients / "task_prolog"), str(SOURCES / "task_prolog.c")]
    subprocess.run([*gcc, *made], check=True)


@contextmanager
def resident(world: World) -> Iterator[subprocess.Popen[bytes]]:
    """Start the runner as a service, and wait until it listens; its output is in root/said."""
    with (world.root / "said").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "health.runner"], env=world.environment, stderr=said, cwd="/"
        )
    metrics = world.root / "runner.prom"
    metrics.unlink(missing_ok=True)
    try:
        until(metrics.exists, "the runner listens")
        yield process
    finally:
        process.kill()
        process.wait()
        (world.root / "runner/socket").unlink(missing_ok=True)


def make(root: Path) -> World:
    world = World(root)
    world.tree.mkdir()
    (world.root / "sync").mkdir()
    world.policy()
    os.chmod(root, 0o755)  # noqa: PTH101  # of the caller's own directory
    return world
