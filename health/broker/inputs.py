"""The node's GPUs, from the memory of the check that counts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ground.files import read_json


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    serial: str
    bus: str
    model: str

    def is_called(self, subject: str) -> bool:
        """Match a subject by UUID or bus: "00000000:3B:00.0" for nvidia-smi, "0000:3b:00" for the kernel."""
        bus = subject.lower()
        return subject == self.uuid or (len(bus) >= 10 and bus in self.bus.lower())


def read_gpus(memory: Path, boot_id: str) -> tuple[Gpu, ...]:
    """Return the GPUs that answered at the last count."""
    data = read_json(memory)
    if data.get("boot_id") != boot_id or not isinstance(data.get("state"), dict):
        return ()
    listed = data["state"].get("gpus", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    return tuple(Gpu(*(str(item.get(key, "")) for key in ("uuid", "serial", "bus", "model"))) for item in listed)
