"""Try a changed configuration in the cluster's own images: slurm.conf, drop-ins, and a rehearsal of the state."""

from __future__ import annotations

import io
import json
import tarfile
import time
import uuid
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cluster import ClusterError
from cluster.change.plan import list_partitions
from cluster.manifests import Manifests, PodSpec, VolumeMount, VolumeSource, resolve_env
from cluster.pods import CHECK_LABEL, CORRECT, Kubelet, RunningPod, publish_files, read_published_files, write_private
from cluster.report import progress
from cluster.values import CONTROLLER, RELEASE, Options, dump

CONFIG = f"{RELEASE}-config"
JUDGED_WITHIN = 300.0  # covers two requests to a hanging slurmctld, its end and its restart
PAUSE = 0.2


class RefusedSlurmConf(ClusterError):
    """The controller refused the mounted slurm.conf, or did not decide in time."""

    @property
    def can_pass_later(self) -> bool:
        """Return whether the controller takes the same file later: its jobs end, or an operator accepts it."""
        return ENDS_JOBS in self.why

    def forgotten(self, file: str) -> ClusterError:
        """Return the error for values that are not stored."""
        hint = (
            "the cluster runs on with its last good one, and keeps the values from before: `make up` publishes them"
            " again; or correct the file, then `make up ARGS='--values FILE'`"
        )
        return ClusterError(self.what, self.why, file=file or None, hint=hint)


def confirm(run_slurm: Callable[[Iterable[str]], tuple[int, str]], before: Container[str]) -> None:
    """Wait for the controller's result on the new files; RefusedSlurmConf if it does not take them.

    A controller that did not exist `before` becomes ready with them, or not at all.
    """
    if CONTROLLER not in before:
        return
    end = time.monotonic() + JUDGED_WITHIN
    while True:
        code, text = run_slurm(["minivm", "config", "status", "--json"])
        try:
            result = json.loads(text)
            state, reason = str(result["state"]), str(result["why"])
        except (ValueError, KeyError, TypeError):
            return  # older images lack this command
        if code == 0:
            return
        if state == "refused" or time.monotonic() > end:
            hint = f"the cluster runs on with its last good one; {CORRECT}"
            raise RefusedSlurmConf("change slurm.conf", reason, hint=hint)
        time.sleep(PAUSE)


def confirm_values(
    run_slurm: Callable[[Iterable[str]], tuple[int, str]],
    running: Container[str],
    options: Options,
    before: Options | None,
    stored: Path,
) -> None:
    """Confirm the files; after a refusal store the values from before, so that the next `up` does not repeat it."""
    try:
        confirm(run_slurm, running)
    except RefusedSlurmConf as refused:
        if before is None or before.overrides == options.overrides or refused.can_pass_later:
            raise
        rendered = replace(options, overrides=before.overrides, values_file=before.values_file)
        write_private(stored, dump(rendered))
        raise refused.forgotten(options.values_file) from None


def files(desired: Manifests) -> Mapping[str, bytes]:
    """Return the files that the chart renders from the values, as the controller would see them."""
    return desired.files[VolumeSource.CONFIG, CONFIG].data


def files_before(kubelet: Kubelet, desired: Manifests) -> Mapping[str, bytes]:
    """Return the files that the controller's pod sees now."""
    (pod,) = [pod for pod in desired.pods if pod.name == CONTROLLER]
    volumes = [mount.volume for mount in pod.mounts if mount.volume.of == CONFIG]
    return read_published_files(kubelet.volume_directory(pod, volumes[0].name)) if volumes else {}


def ask(kubelet: Kubelet, controller: RunningPod, word: str, data: Mapping[str, bytes]) -> tuple[int, str]:
    """Run `minivm config diff` or `check` on files that are not mounted yet; return the exit code and the text."""
    directory, tar = pack(data)
    kubelet.api.put_archive(controller.container, "/tmp", tar)
    try:
        return kubelet.exec(controller.container, ["minivm", "config", word, f"/tmp/{directory}"])
    finally:
        kubelet.exec(controller.container, ["rm", "-r", f"/tmp/{directory}"])


# How `minivm config check` begins its answer about a file that slurmctld cannot take, or takes but ends jobs.
_REFUSED = "minivm: cannot take this slurm.conf: "
ENDS_JOBS = "it would end jobs"


@dataclass(frozen=True, slots=True)
class ConfJudgement:
    """The controller's answer about a changed slurm.conf."""

    changes: tuple[str, ...] = ()
    ended_jobs: tuple[str, ...] = ()
    objection: str = ""  # why its Slurm cannot take the file


def judge(kubelet: Kubelet, controller: RunningPod | None, data: Mapping[str, bytes]) -> ConfJudgement:
    """Ask the controller about a changed slurm.conf; one that does not answer has no objection."""
    if controller is None or not controller.running:
        return ConfJudgement()
    return read_judgement(*ask(kubelet, controller, "check", data))


def read_judgement(code: int, text: str) -> ConfJudgement:
    """Read the answer of `minivm config check`."""
    lines = text.splitlines()
    refused = "".join(line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED))
    if code and not refused.startswith(ENDS_JOBS):
        return ConfJudgement(objection=refused)
    ended_jobs = tuple(line.removeprefix("ends jobs: ") for line in lines if line.startswith("ends jobs: "))
    not_changes = ("ends jobs: ", "no job ends", "nothing changes", "minivm: ", "hint: ")
    return ConfJudgement(tuple(line for line in lines if not line.startswith(not_changes)), ended_jobs)


def refuse_objection(
    objection: str, controller: RunningPod, desired: Manifests, slurm_in: Callable[[str], str], *, file: str
) -> None:
    """Refuse a slurm.conf that the controller would refuse, before any pod changes.

    A controller of another Slurm may know what this one does not: it decides itself once it runs.
    """
    wanted = [pod.image for pod in desired.pods if pod.name == controller.pod]
    if not objection or [slurm_in(image) for image in wanted] != [slurm_in(controller.image)]:
        return
    hint = "no pod was changed; correct the values"
    if wanted != [controller.image]:
        hint += ", or, if only the new image takes them, let the cluster take that image first, with the old values"
    raise ClusterError("change slurm.conf", objection, file=file or None, hint=hint)


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """Effects of a changed slurm.conf on a running cluster."""

    changes: tuple[str, ...] = ()
    ended_jobs: tuple[str, ...] = ()
    lost_partitions: frozenset[str] = frozenset()


NO_CHANGE = PlannedChange()


def plan_change(
    kubelet: Kubelet,
    desired: Manifests,
    controller: RunningPod | None,
    slurm_in: Callable[[str], str],
    *,
    file: str,
) -> PlannedChange:
    """Ask the controller about a changed slurm.conf. ClusterError if it would refuse it."""
    data = files(desired)
    lost_partitions = list_partitions(files_before(kubelet, desired)) - list_partitions(data)
    judgement = judge(kubelet, controller, data)
    if controller is not None:
        refuse_objection(judgement.objection, controller, desired, slurm_in, file=file)
    return PlannedChange(judgement.changes, judgement.ended_jobs, frozenset(lost_partitions))


def pack(data: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Pack the files into a tar of one uniquely named directory; return name and tar."""
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


DIRECTORIES = ("services.d", "supervisor.d")
DROP_INS_WITHIN_S = 60


def check_drop_ins(kubelet: Kubelet, desired: Manifests) -> None:
    """Raise ClusterError for drop-ins that a pod would refuse; skip those that the pods have already."""
    checked_roles = set()
    for pod in desired.pods:
        mounts = [mount for mount in pod.mounts if PurePosixPath(mount.path).name in DIRECTORIES]
        if pod.role in checked_roles or not any(_has_changed(kubelet, pod, mount, desired) for mount in mounts):
            continue
        checked_roles.add(pod.role)
        refusal = _refusal_of(kubelet, pod, mounts, desired)
        if refusal:
            raise ClusterError(f"take the drop-ins of {pod.role}", refusal, hint="no pod was changed")


def _has_changed(kubelet: Kubelet, pod: PodSpec, mount: VolumeMount, desired: Manifests) -> bool:
    files = _drop_ins_in(mount, desired)
    return bool(files) and read_published_files(kubelet.volume_directory(pod, mount.volume.name)) != files


def _drop_ins_in(mount: VolumeMount, desired: Manifests) -> dict[str, bytes]:
    files = desired.files.get((mount.volume.source, mount.volume.of))
    return dict(files.data) if files is not None and mount.volume.source is VolumeSource.CONFIG else {}


def _refusal_of(kubelet: Kubelet, pod: PodSpec, mounts: list[VolumeMount], desired: Manifests) -> str:
    """Run `minivm check` of the pod's own image in a short-lived container; return its error, or ""."""
    root = kubelet.state / "check"
    binds: list[dict[str, Any]] = []
    for mount in mounts:
        directory = root / pod.role / mount.volume.name
        publish_files(directory, _drop_ins_in(mount, desired), mode=mount.volume.mode)
        binds.append({"Type": "bind", "Source": str(directory), "Target": mount.path, "ReadOnly": True})
    api = kubelet.api
    host = api.create_host_config(mounts=binds, cap_drop=["ALL"], network_mode="none")
    env = resolve_env(pod, address="127.0.0.1")
    labels = {CHECK_LABEL: kubelet.cluster}
    container = api.create_container(
        pod.image, ["check"], entrypoint=["/usr/bin/minivm"], environment=env, host_config=host, labels=labels
    )["Id"]
    try:
        api.start(container)
        code = api.wait(container, timeout=DROP_INS_WITHIN_S)["StatusCode"]
        message = str(api.logs(container).decode(errors="replace")).strip().removeprefix("minivm: ")
    finally:
        api.remove_container(container, force=True, v=True)
    return message or f"minivm check ended with {code}" if code else ""


CANNOT_REHEARSE = "rehearse the change"
# Where the controller keeps copies of its state (init/slurm/place.py).
COPIES = PurePosixPath("/var/lib/minivm/backups")
# What root needs to give a copy's files to an unprivileged user, and to end that user's daemons.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
REHEARSED_WITHIN_S = 4000


def rehearse(
    kubelet: Kubelet,
    controller: RunningPod,
    image: str,
    conf: Mapping[str, bytes],
    slurm: str,
    log: Callable[[str], None],
) -> tuple[int, str]:
    """Start the image's Slurm with these files on a copy of the cluster's state; return exit code and text.

    Its daemons reach no network (init/state/prove.py). The container still has one: Slurm 26.05 does not start
    beside the loopback alone.
    """
    begun = time.monotonic()

    def describe() -> str:
        return f"the rehearsal runs for {time.monotonic() - begun:.0f} s"

    log(f"{controller.pod}: copies its state")
    with progress(log, describe):
        name = save_state(kubelet, controller)
    log(f"starts Slurm {slurm} on the copy {name}, without network")
    directory, tar = pack(conf)
    api = kubelet.api
    binds = [{"Type": "bind", "Source": _copies_of(kubelet, controller), "Target": str(COPIES), "ReadOnly": True}]
    host = api.create_host_config(
        mounts=binds, cap_drop=["ALL"], cap_add=list(CAPABILITIES), network_mode=kubelet.network
    )
    container = api.create_container(
        image,
        ["state", "rehearse", name, "--config", f"/tmp/{directory}"],
        entrypoint=["/usr/bin/minivm"],
        host_config=host,
        labels={CHECK_LABEL: kubelet.cluster},
    )["Id"]
    try:
        api.put_archive(container, "/tmp", tar)
        api.start(container)
        with progress(log, describe):
            code = int(api.wait(container, timeout=REHEARSED_WITHIN_S)["StatusCode"])
        return code, str(api.logs(container).decode(errors="replace"))
    finally:
        api.remove_container(container, force=True, v=True)


def save_state(kubelet: Kubelet, controller: RunningPod) -> str:
    """Copy the state and return the copy's name."""
    code, text = kubelet.exec(controller.container, ["minivm", "state", "save", "--json"])
    try:
        if code == 0:
            return str(json.loads(text)["name"])
    except (ValueError, KeyError, TypeError):
        pass
    hint = "an image of before `minivm state` cannot be rehearsed" if "no command" in text else ""
    raise ClusterError(CANNOT_REHEARSE, f"the controller could not copy its state: {text.strip()[-300:]}", hint=hint)


def _copies_of(kubelet: Kubelet, controller: RunningPod) -> str:
    """Return the machine's directory with the controller's copies."""
    mounts = kubelet.api.inspect_container(controller.container)["Mounts"]
    mounts_with_copies = [mount for mount in mounts if COPIES.is_relative_to(mount["Destination"])]
    if not mounts_with_copies:
        raise ClusterError(CANNOT_REHEARSE, f"no volume of the controller holds {COPIES}")
    nearest = max(mounts_with_copies, key=lambda mount: len(mount["Destination"]))
    return str(PurePosixPath(nearest["Source"]) / COPIES.relative_to(nearest["Destination"]))
