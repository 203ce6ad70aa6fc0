"""This cluster's slurm.conf: checked by its controller before and after it is applied."""

from __future__ import annotations

import io
import json
import tarfile
import time
import uuid
from collections.abc import Callable, Container, Iterable, Mapping

from cluster.errors import ClusterError
from cluster.manifests import Manifests, VolumeSource
from cluster.pods import CORRECT, Kubelet, RunningPod
from cluster.publish import published
from cluster.values import RELEASE

CONTROLLER = f"{RELEASE}-controller-0"
CONFIG = f"{RELEASE}-config"
JUDGED_WITHIN = 300.0  # a slurmctld that hangs is asked twice, killed and started
PAUSE = 0.2

Exec = Callable[[str, Iterable[str]], tuple[int, str]]


def confirm(run: Exec, before: Container[str]) -> None:
    """Wait for the controller's result on the new files; ClusterError if it refuses them.

    A controller that did not exist `before` becomes ready with them, or not at all.
    """
    if CONTROLLER not in before:
        return
    end = time.monotonic() + JUDGED_WITHIN
    while True:
        code, text = run(CONTROLLER, ["minivm", "config", "status", "--json"])
        try:
            result = json.loads(text)
            state, reason = str(result["state"]), str(result["why"])
        except (ValueError, KeyError, TypeError):
            return  # older images lack this command
        if code == 0:
            return
        if state == "refused" or time.monotonic() > end:
            hint = f"the cluster runs on with its last good one; {CORRECT}"
            raise ClusterError("change slurm.conf", reason, hint=hint)
        time.sleep(PAUSE)


def files(known: Manifests) -> Mapping[str, bytes]:
    """Return the files that the chart renders from the values, as the controller would see them."""
    return known.files[VolumeSource.CONFIG, CONFIG].data


def files_before(kubelet: Kubelet, known: Manifests) -> Mapping[str, bytes]:
    """Return the files that the controller's pod sees now."""
    (pod,) = [pod for pod in known.pods if pod.name == CONTROLLER]
    volumes = [mount.volume for mount in pod.mounts if mount.volume.of == CONFIG]
    return published(kubelet.volume_directory(pod, volumes[0].name)) if volumes else {}


def ask(kubelet: Kubelet, controller: RunningPod, word: str, data: Mapping[str, bytes]) -> tuple[int, str]:
    """Run `minivm config diff` or `check` on files that are not mounted yet; return the exit code and the text."""
    directory, tar = packed(data)
    kubelet.api.put_archive(controller.container, "/tmp", tar)
    try:
        return kubelet.exec(controller.container, ["minivm", "config", word, f"/tmp/{directory}"])
    finally:
        kubelet.exec(controller.container, ["rm", "-r", f"/tmp/{directory}"])


def packed(data: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Pack a uniquely named directory into a tar, for a shared place."""
    name = f"minivm-{uuid.uuid4().hex}"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        directory = tarfile.TarInfo(name)
        directory.type, directory.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(directory)
        for file, content in data.items():
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    return name, out.getvalue()
