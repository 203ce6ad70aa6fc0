"""Hardware that a node has or was promised: checks of other hardware do not apply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from health.api import Hardware
from health.checks.collect import matching

PRESENCE: Mapping[Hardware, tuple[str, ...]] = {
    Hardware.GPU: ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*"),
    Hardware.IB: ("/sys/class/infiniband/*",),
    Hardware.NVME: ("/dev/nvme[0-9]", "/sys/class/nvme/nvme*"),
}


def present(hardware: Hardware, expect: Mapping[str, str]) -> bool:
    """Tell if the node has the hardware or was promised it: a GPU that vanished is still promised."""
    if hardware is Hardware.ANY or expect.get(hardware.value, "0") not in {"", "0"}:
        return True
    if hardware is Hardware.GPU and any(
        # The bus shows the GPU even if no driver is loaded.
        Path(path).read_text().strip() == "0x10de"
        and (Path(path).parent / "class").read_text().startswith(("0x0300", "0x0302"))
        for path in matching("/sys/bus/pci/devices/*/vendor")
    ):
        return True
    return any(matching(pattern) for pattern in PRESENCE[hardware])


def expectations(environment: Mapping[str, str]) -> dict[str, str]:
    """Read MINIVM_EXPECT_GPUS=8 and the like, as {"gpu": "8"}."""
    names = {"MINIVM_EXPECT_GPUS": "gpu", "MINIVM_EXPECT_IB": "ib", "MINIVM_EXPECT_NVME": "nvme"}
    return {key: environment[name] for name, key in names.items() if environment.get(name, "").isdecimal()}
