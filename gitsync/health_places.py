"""Where a node's health lives on disk, what hardware it has or was promised, and which checks are due."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .health_api import Check, Command, Hardware
from .health_collect import matching
from .verdict import HEALTH, VERDICTS, Verdict, health_index, health_state

SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacctmgr"})
CAPSULES = "/var/log/minivm/capsules"


@dataclass(frozen=True, slots=True)
class Places:
    verdicts: Path = Path(VERDICTS)
    state: Path = Path(HEALTH)
    capsules: Path = Path(CAPSULES)

    @classmethod
    def from_environment(cls) -> Places:
        return cls(
            Path(os.environ.get("MINIVM_VERDICTS", VERDICTS)),
            health_state(),
            Path(os.environ.get("MINIVM_CAPSULES", CAPSULES)),
        )

    @property
    def index(self) -> Path:
        return health_index(self.state)

    def memory(self, check: str) -> Path:
        return self.state / "memory" / f"{check}.json"


PRESENCE: Mapping[Hardware, tuple[str, ...]] = {
    Hardware.GPU: ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*"),
    Hardware.IB: ("/sys/class/infiniband/*",),
    Hardware.NVME: ("/dev/nvme[0-9]", "/sys/class/nvme/nvme*"),
}


def present(hardware: Hardware, expect: Mapping[str, str]) -> bool:
    """Whether the node has, or was promised, what the check is about: a GPU that vanished is still promised."""
    if hardware is Hardware.ANY or expect.get(hardware.value, "0") not in {"", "0"}:
        return True
    if hardware is Hardware.GPU and any(
        # The bus says it even where no driver is loaded.
        Path(path).read_text().strip() == "0x10de"
        and (Path(path).parent / "class").read_text().startswith(("0x0300", "0x0302"))
        for path in matching("/sys/bus/pci/devices/*/vendor")
    ):
        return True
    return any(matching(pattern) for pattern in PRESENCE[hardware])


def expectations(environment: Mapping[str, str]) -> dict[str, str]:
    """MINIVM_EXPECT_GPUS=8 and the like, as {"gpu": "8"}."""
    names = {"MINIVM_EXPECT_GPUS": "gpu", "MINIVM_EXPECT_IB": "ib", "MINIVM_EXPECT_NVME": "nvme"}
    return {key: environment[name] for name, key in names.items() if environment.get(name, "").isdigit()}


def asks_slurm(check: Check) -> bool:
    """slurmd answers nobody while it waits for its own health program: a question of ours would wait for it in turn."""
    return any(isinstance(source, Command) and source.argv[0] in SLURM for source in check.sources)


def due(period_s: float, known: Verdict | None, now: float, boot: str) -> bool:
    """Whether a background round must run it again; a little early rather than a round late."""
    return known is None or not known.fresh(now, boot) or now - known.at >= 0.9 * period_s
