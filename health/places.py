"""Paths of a node's health files, and the boot ID, for checks, prologs and the broker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gitsync.layout import DEFAULT_ROOT

# Mounted beside the tree; it replaces the tree's file as a whole.
OPERATORS_POLICY = Path("/mnt/minivm/config/scripts/policy.json")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Places:
    verdicts: Path = Path("/run/minivm/verdicts")
    # Files that rounds of checks leave for the next round, for prologs and for the broker.
    state: Path = Path("/run/minivm/health")
    capsules: Path = Path("/var/log/minivm/capsules")
    # A path of the host: it outlives pods.
    ledger: Path = Path("/var/lib/minivm/ledger")
    broker: Path = Path("/run/minivm/broker.sock")
    # The broker's state for people; nothing reads it back.
    broker_state: Path = Path("/run/minivm/broker.json")
    metrics: Path = Path("/run/minivm/metrics.d/health.prom")
    # The resident runner's socket, accessible to root only.
    runner: Path = Path("/run/minivm/runner")
    # The runner's plan for task prologs, which run as users.
    plan: Path = Path("/run/minivm/task_prolog.plan")
    # gitsync's root directory.
    scripts: Path = Path(DEFAULT_ROOT)
    policy: Path = OPERATORS_POLICY
    # slurmd's: without room in it no job starts.
    spool: Path = Path("/var/spool/slurmd")
    cgroups: Path = Path("/sys/fs/cgroup")

    @classmethod
    def from_environment(cls) -> Places:
        default = cls()

        def get(name: str, default_path: Path) -> Path:
            return Path(os.environ.get(name, default_path))

        return cls(
            get("MINIVM_VERDICTS", default.verdicts),
            get("MINIVM_HEALTH_STATE", default.state),
            get("MINIVM_CAPSULES", default.capsules),
            get("MINIVM_LEDGER", default.ledger),
            get("MINIVM_BROKER", default.broker),
            get("MINIVM_BROKER_STATE", default.broker_state),
            get("MINIVM_HEALTH_METRICS", default.metrics),
            get("MINIVM_RUNNER", default.runner),
            get("MINIVM_RUNNER_PLAN", default.plan),
            get("MINIVM_GITSYNC_ROOT", get("MINIVM_SCRIPTS", default.scripts)),
        )

    @property
    def active(self) -> Path:
        """Last result of each active check, for the pod's page (init/view/conditions.py)."""
        return self.state / "active/said.json"

    @property
    def index(self) -> Path:
        """The index of the last round's checks (`health.rounds`)."""
        return self.state / "index.json"

    @property
    def deep(self) -> Path:
        """The summary of the deep checks (`health.rounds`), alone in its directory because the helper watches that."""
        return self.state / "deep" / "said.json"

    @property
    def gpus(self) -> Path:
        """The last sample of the GPUs (`health.gpus`)."""
        return self.state / "gpus.json"

    def verdict(self, check: str) -> Path:
        return self.verdicts / f"{check}.json"

    def memory(self, check: str) -> Path:
        return self.state / "memory" / f"{check}.json"


def boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
