"""Where a node's health lies, and which boot this is: the one place that checks, prologs and the broker ask."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gitsync.layout import DEFAULT_ROOT

# Mounted beside the tree: it wins over the tree's file, whole.
OPERATORS_POLICY = Path("/mnt/minivm/config/scripts/policy.json")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Places:
    verdicts: Path = Path("/run/minivm/verdicts")
    # What rounds of checks leave for one another, for prologs and for the broker.
    state: Path = Path("/run/minivm/health")
    capsules: Path = Path("/var/log/minivm/capsules")
    # Of the host: it outlives pods.
    ledger: Path = Path("/var/lib/minivm/ledger")
    broker: Path = Path("/run/minivm/broker.sock")
    # What the broker knows, for people: it is never read back.
    broker_state: Path = Path("/run/minivm/broker.json")
    metrics: Path = Path("/run/minivm/metrics.d/health.prom")
    # Where the resident runner listens: root's alone.
    runner: Path = Path("/run/minivm/runner")
    # And what it leaves for task prologs, which are users'.
    plan: Path = Path("/run/minivm/task_prolog.plan")
    # gitsync's root.
    scripts: Path = Path(DEFAULT_ROOT)
    policy: Path = OPERATORS_POLICY

    @classmethod
    def from_environment(cls) -> Places:
        default = cls()

        def get(name: str, otherwise: Path) -> Path:
            return Path(os.environ.get(name, otherwise))

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
    def index(self) -> Path:
        """The checks of the last round, for who does not load them: see `health.index`."""
        return self.state / "index.json"

    @property
    def deep(self) -> Path:
        """What the deep checks have said: see `health.deep`. Alone in its directory, for somebody waits for changes."""
        return self.state / "deep" / "said.json"

    def verdict(self, check: str) -> Path:
        return self.verdicts / f"{check}.json"

    def memory(self, check: str) -> Path:
        return self.state / "memory" / f"{check}.json"


def boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
