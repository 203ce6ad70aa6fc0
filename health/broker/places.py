"""Where the broker finds what it decides by, and where it leaves what it knows."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from health.broker.inputs import OPERATORS_POLICY
from health.broker.ledger import LEDGER


@dataclass(frozen=True, slots=True)
class Places:
    verdicts: Path
    health: Path
    socket: Path
    state: Path
    ledger: Path
    scripts: str
    policy: Path = OPERATORS_POLICY

    @classmethod
    def from_environment(cls) -> Places:
        def get(name: str, default: str) -> str:
            return os.environ.get(name, default)

        return cls(
            Path(get("MINIVM_VERDICTS", "/run/minivm/verdicts")),
            Path(get("MINIVM_HEALTH_STATE", "/run/minivm/health")),
            Path(get("MINIVM_BROKER", "/run/minivm/broker.sock")),
            Path(get("MINIVM_BROKER_STATE", "/run/minivm/broker.json")),
            Path(get("MINIVM_LEDGER", LEDGER)),
            get("MINIVM_GITSYNC_ROOT", get("MINIVM_SCRIPTS", "/var/lib/minivm/scripts")),
        )


def save(path: Path, data: Mapping[str, object]) -> None:
    """What the broker knows, for people: it is never read back, and may be lost."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(data))
        temporary.rename(path)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
