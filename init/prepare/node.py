"""Settings that slurmd starts with: the node's configuration (`--conf` of a dynamic slurmd) and `slurm.fastScripts`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence

from init.pod.pod import Pod
from init.prepare import cgroups

# The pod's GPUs for the node's gres, from the driver's library or else counted by device files.
NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96


def gpu_models(library: str = NVML) -> list[str] | None:
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


def gres(names: Sequence[str]) -> str:
    """Format Slurm's Gres= for these GPUs, with the type in the form of Slurm's own AutoDetect=nvml."""
    counts: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"[^a-z0-9_.-]+", "_", name.lower().replace(" ", "_")).strip("_")
        counts[kind] = counts.get(kind, 0) + 1
    return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in sorted(counts.items()))


def find_gpus(pod: Pod) -> tuple[str, str]:
    """Return Gres= (empty without GPUs) and its source."""
    names = gpu_models()
    if names:
        return gres(names), "the driver"
    if pod.gpus:
        return f"gpu:{pod.gpus}", "/dev/nvidia*"
    return "", "no driver" if names is None else "a driver without GPUs"


LIBRARY = "/usr/libexec/minivm/launch.so"


def run(pod: Pod) -> str:
    mode = pod.choice("MINIVM_NODE_MODE", "dynamic", ["dynamic", "static"])
    containment = cgroups.run(pod)
    gres, source = find_gpus(pod)
    own = dict(cgroups.node_limits(pod))
    if gres:
        own["Gres"] = gres
    configuration = node_configuration(own, pod.setting("MINIVM_NODE_FEATURES"), pod.setting("MINIVM_NODE_CONF"))
    pod.publish("slurmd", {"MINIVM_SLURMD_CONF": configuration})
    shown = configuration if mode == "dynamic" else "static: the controller's slurm.conf describes it"
    return f"node {pod.name}: {shown}; GPUs: {gres or 'none'} (from {source}); {containment}"


def node_configuration(own: Mapping[str, str], features: str, override: str) -> str:
    """Combine detected values, the operator's features, and the operator's own `Key=value` words, which win."""
    merged = dict(own) | {"Feature": ",".join(["minivm", *features.replace(",", " ").split()])}
    names = {key.lower(): key for key in merged}
    for word in override.split():
        key, equals, value = word.partition("=")
        if not equals:
            from init.errors import ConfigError

            raise ConfigError("describe the node", f"{word!r} in MINIVM_NODE_CONF is not Key=value")
        merged[names.get(key.lower(), key)] = value
    return " ".join(f"{key}={value}" for key, value in merged.items() if value)


def fast_scripts(pod: Pod) -> str:
    """Publish LD_PRELOAD for slurmd if `slurm.fastScripts` is set.

    A reason to leave it off becomes a condition of the pod, not a failure.
    """
    if pod.choice("MINIVM_FAST_SCRIPTS", "no", ["yes", "no"]) == "no":
        pod.publish("fast-scripts", {})
        return "off"
    objection = _no_fast_scripts(pod)
    _tell_fast_scripts(objection)
    # A preload that the site gives the whole pod stays: the library hands neither on to scripts.
    paths = [path for path in (LIBRARY, pod.setting("LD_PRELOAD")) if path]
    pod.publish("fast-scripts", {} if objection else {"LD_PRELOAD": ":".join(paths)})
    return objection or f"slurmd loads {LIBRARY}"


def _no_fast_scripts(pod: Pod) -> str:
    from init.slurm.place import read_release

    release = read_release(pod)
    if release is None or not release.fast_scripts:
        name = f"Slurm {release.name}" if release else "this Slurm"
        return f"slurm.fastScripts stays off: {name} was not tested with it; set it to false, or run a tested release"
    if not pod.has(LIBRARY):
        return f"slurm.fastScripts stays off: the image has no {LIBRARY}; set it to false, or use an image that has it"
    return ""


def _tell_fast_scripts(why: str) -> None:
    """Set the pod's condition, which `minivm status` and `minivm why` show; an empty text removes it."""
    from init.errors import InitError
    from init.pod.client import Client

    try:
        with Client(within=2.0) as client:
            client.request("condition", name="fast-scripts", text=why, blocking=False)
    except (InitError, OSError, ValueError, EOFError):
        return  # no init listens, as in an image that is tried by hand; the log has the line
