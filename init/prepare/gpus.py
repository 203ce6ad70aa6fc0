"""The pod's GPUs for the node's gres, from the driver's library or else counted by device files."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

from init.pod.pod import Pod

LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


def models(library: str = LIBRARY) -> list[str] | None:
    """Return the name of each GPU that the driver shows to this pod; None without a driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        names = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            name = ctypes.create_string_buffer(_NAME_BYTES)
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue  # a GPU that has fallen off the bus is not offered
            if nvml.nvmlDeviceGetName(device, name, _NAME_BYTES) != 0:
                name.value = b""
            names.append(name.value.decode(errors="replace"))
        return names
    finally:
        nvml.nvmlShutdown()


def device_files(pod: Pod) -> int:
    return sum(1 for path in pod.path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def gres(names: Sequence[str]) -> str:
    """Format Slurm's Gres= for these GPUs, with the type in the form of Slurm's own AutoDetect=nvml."""
    counts: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"[^a-z0-9_.-]+", "_", name.lower().replace(" ", "_")).strip("_")
        counts[kind] = counts.get(kind, 0) + 1
    return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in sorted(counts.items()))


def found(pod: Pod) -> tuple[str, str]:
    """Return Gres= (empty without GPUs) and its source."""
    names = models()
    if names:
        return gres(names), "the driver"
    count = device_files(pod)
    if count:
        return f"gpu:{count}", "/dev/nvidia*"
    return "", "no driver" if names is None else "a driver without GPUs"
