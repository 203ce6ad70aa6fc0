"""What this pod offers to Slurm as a node: the `--conf` of a dynamic slurmd."""

from __future__ import annotations

from collections.abc import Mapping

from init.pod.pod import Pod
from init.prepare import cgroups, gpus, node_limits


def run(pod: Pod) -> str:
    mode = pod.choice("MINIVM_NODE_MODE", "dynamic", ["dynamic", "static"])
    containment = cgroups.run(pod)
    gres, source = gpus.found(pod)
    own = dict(node_limits.found(pod))
    if gres:
        own["Gres"] = gres
    configuration = node_configuration(own, pod.setting("MINIVM_NODE_FEATURES"), pod.setting("MINIVM_NODE_CONF"))
    pod.publish("slurmd", {"MINIVM_SLURMD_CONF": configuration})
    shown = configuration if mode == "dynamic" else "static: the controller's slurm.conf describes it"
    return f"node {pod.name}: {shown}; GPUs: {gres or 'none'} (from {source}); {containment}"


def node_configuration(own: Mapping[str, str], features: str, override: str) -> str:
    """What was found, the operator's features, and over both the operator's own `Key=value` words."""
    merged = dict(own) | {"Feature": ",".join(["minivm", *features.replace(",", " ").split()])}
    names = {key.lower(): key for key in merged}
    for word in override.split():
        key, equals, value = word.partition("=")
        if not equals:
            from init.errors import ConfigError

            raise ConfigError("describe the node", f"{word!r} in MINIVM_NODE_CONF is not Key=value")
        merged[names.get(key.lower(), key)] = value
    return " ".join(f"{key}={value}" for key, value in merged.items() if value)
