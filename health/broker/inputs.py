"""What the broker decides by beside verdicts: the node's GPUs, as the check of their number remembers them."""

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
        """By its UUID, or by its bus: "00000000:3B:00.0" for nvidia-smi, "0000:3b:00" for the kernel."""
        bus = subject.lower()
        return subject == self.uuid or (len(bus) >= 10 and bus in self.bus.lower())


def read_gpus(memory: Path, boot_id: str) -> tuple[Gpu, ...]:
    """The GPUs that answered when they were last counted."""
    data = read_json(memory)
    if data.get("boot_id") != boot_id or not isinstance(data.get("state"), dict):
        return ()
    listed = data["state"].get("gpus", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    return tuple(Gpu(*(str(item.get(key, "")) for key in ("uuid", "serial", "bus", "model"))) for item in listed)
