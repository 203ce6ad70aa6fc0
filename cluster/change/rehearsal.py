"""Rehearse a change of Slurm: start the wanted image on a copy of the cluster's state.

Its daemons reach no network (init/state/prove.py). The container has one all the same: Slurm 26.05 does not start
beside the loopback alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from cluster import slurm_conf
from cluster.errors import ClusterError
from cluster.pods import LABEL, Kubelet, RunningPod

CANNOT = "rehearse the change"
# Where the controller keeps copies of its state (init/slurm/place.py).
COPIES = PurePosixPath("/var/lib/minivm/backups")
# What root needs to give a copy's files to an unprivileged user, and to end that user's daemons.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
WITHIN_S = 4000


def rehearse(kubelet: Kubelet, controller: RunningPod, image: str, conf: Mapping[str, bytes]) -> tuple[int, str]:
    """Save the state, and start it in a container of the image with these files; return exit code and text."""
    name = save(kubelet, controller)
    directory, tar = slurm_conf.packed(conf)
    api = kubelet.api
    binds = [{"Type": "bind", "Source": copies_of(kubelet, controller), "Target": str(COPIES), "ReadOnly": True}]
    host = api.create_host_config(
        mounts=binds, cap_drop=["ALL"], cap_add=list(CAPABILITIES), network_mode=kubelet.network
    )
    container = api.create_container(
        image,
        ["state", "rehearse", name, "--config", f"/tmp/{directory}"],
        entrypoint=["/usr/bin/minivm"],
        host_config=host,
        labels={LABEL: f"{kubelet.cluster}-check"},
    )["Id"]
    try:
        api.put_archive(container, "/tmp", tar)
        api.start(container)
        code = int(api.wait(container, timeout=WITHIN_S)["StatusCode"])
        return code, str(api.logs(container).decode(errors="replace"))
    finally:
        api.remove_container(container, force=True, v=True)


def save(kubelet: Kubelet, controller: RunningPod) -> str:
    """Copy the state and return the copy's name."""
    code, text = kubelet.exec(controller.container, ["minivm", "state", "save", "--json"])
    try:
        if code == 0:
            return str(json.loads(text)["name"])
    except (ValueError, KeyError, TypeError):
        pass
    hint = "an image of before `minivm state` cannot be rehearsed" if "no command" in text else ""
    raise ClusterError(CANNOT, f"the controller could not copy its state: {text.strip()[-300:]}", hint=hint)


def copies_of(kubelet: Kubelet, controller: RunningPod) -> str:
    """Return where the machine has the controller's copies."""
    mounts = kubelet.api.inspect_container(controller.container)["Mounts"]
    holding = [mount for mount in mounts if COPIES.is_relative_to(mount["Destination"])]
    if not holding:
        raise ClusterError(CANNOT, f"no volume of the controller holds {COPIES}")
    nearest = max(holding, key=lambda mount: len(mount["Destination"]))
    return str(PurePosixPath(nearest["Source"]) / COPIES.relative_to(nearest["Destination"]))
