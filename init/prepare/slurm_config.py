"""The controller's /etc/slurm, copied from the mounted configuration, or generated if none is mounted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from init.pod.auth import MUNGE, SETTING, SLURM
from init.pod.pod import MOUNTS, Pod, PrepareError, write
from init.slurm import conf
from init.slurm.files import MOUNT, TARGET, LastGoodConfig, SlurmFiles, read
from init.slurm.place import LEASE, base, place_files, several

# Next to this file: the minimum for a controller of dynamic, configless workers. A real cluster brings its own.
DEFAULT = Path(__file__).with_name("slurm.conf")
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={host}
JobAcctGatherType=jobacct_gather/linux
"""
ACCOUNTING_POD = "slurm-accounting"  # the chart's Service; its slurm.conf names another one itself
JWT = """\
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key,disable_token_creation
"""
DEFAULT_CGROUP = "CgroupPlugin=autodetect\nIgnoreSystemd=yes\nEnableControllers=yes\n"
DEFAULT_GRES = "AutoDetect=off\n"


HOSTS = "/etc/hosts"


def run(pod: Pod) -> str:
    if not several(pod):
        name_own_address(pod)
        settle_alone(pod)
    mounted = place_files(pod, read(pod.path(MOUNT)))
    good = LastGoodConfig(pod).read()
    files = start_from(mounted, place_files(pod, good) if good else None)
    names = files.keys()
    SlurmFiles(pod).put(files)
    accounting = pod.accounting
    pod.publish("slurmrestd", {"MINIVM_SLURMRESTD_APIS": "slurmctld" if accounting == "none" else "slurmctld,slurmdbd"})
    if files != mounted:
        return f"installed the last good {', '.join(sorted(names))}; the mounted one is tried on slurmctld"
    if "slurm.conf" in names:
        return f"installed {', '.join(sorted(names))}"
    for name, text in defaults(pod, accounting).items():
        if name not in names:
            write(pod.path(f"{TARGET}/{name}"), text.encode(), mode=0o644, owner=(0, 0))
    return f"no slurm.conf in {MOUNT}: generated a minimal one"


def settle_alone(pod: Pod) -> None:
    """Take a term, as the user slurm, for a controller that is alone again; do nothing if it always was."""
    if not (base(pod) / LEASE).is_dir():
        return
    from ground.commands import ran

    command = ["/opt/minivm/bin/python3", "-I", "-m", "init.state.lease", "alone"]
    done = ran(command, env=dict(pod.env), user="slurm", group="slurm", extra_groups=[])
    if done.returncode:
        raise PrepareError("take the state of the last active controller", (done.stdout + done.stderr).strip())


def name_own_address(pod: Pod) -> None:
    """Map the controller's name to this pod's own address in /etc/hosts.

    Elsewhere the name is a Service's address. From inside the pod behind it, a Service may not answer at all, or show
    slurmdbd a foreign source address, to which slurmdbd then sends the changes that slurmctld should hear of.
    """
    name, address = pod.setting("MINIVM_CONTROLLER"), pod.setting("MINIVM_POD_IP")
    host = pod.controller[0]
    # A literal address needs no name.
    if not name or not address or ":" in host or host.replace(".", "").isdecimal():
        return
    lines = (pod.text(HOSTS) or "").splitlines()
    foreign_lines = [line for line in lines if host not in line.partition("#")[0].split()[1:]]
    text = "".join(f"{line}\n" for line in [*foreign_lines, f"{address}\t{host}"])
    if [line.split() for line in lines if line not in foreign_lines] == [[address, host]]:
        return
    try:
        # The kubelet and docker mount this file: write it in place, never replace it.
        pod.path(HOSTS).write_text(text)
    except OSError as error:
        raise PrepareError(f"write {HOSTS}", error.strerror or str(error)) from error


def start_from(mounted: Mapping[str, bytes], good: Mapping[str, bytes] | None) -> Mapping[str, bytes]:
    """Choose the files to start from: the last ones that ran.

    A change goes one way, also while pods are replaced: it is checked and tried on a running slurmctld
    (`init.helpers.configwatch`), so a boot must not undo or apply it. Two are applied here. No running slurmctld can
    change to another AuthType; and one that waits for a slurmdbd whose pod is gone hangs in a reconfigure.
    """
    if not good or "slurm.conf" not in mounted or "slurm.conf" not in good:
        return mounted
    return _with_slurmdbd_of(mounted, good) if _auth_type(good) == _auth_type(mounted) else mounted


def _with_slurmdbd_of(mounted: Mapping[str, bytes], good: Mapping[str, bytes]) -> Mapping[str, bytes]:
    before, after = conf.read(good), conf.read(mounted)
    text = good["slurm.conf"]
    for key in ("accountingstoragehost", "accountingstorageport"):
        old, new = before.value(key), after.value(key)
        if old and new and old != new:
            line = rf"^(\s*{key}\s*=\s*){re.escape(old)}(?=[\s#]|$)".encode()
            match = re.search(line, text, re.IGNORECASE | re.MULTILINE)
            text = text[: match.end(1)] + new.encode() + text[match.end() :] if match else text
    return {**good, "slurm.conf": text}


def _auth_type(files: Mapping[str, bytes]) -> str:
    return conf.read(files).value("authtype").lower()


def defaults(pod: Pod, accounting: str) -> dict[str, str]:
    # slurmctld looks for its own host name among the controllers; other pods reach it by the configured name.
    host = os.uname().nodename.split(".")[0]
    known_as = pod.controller[0] if pod.setting("MINIVM_CONTROLLER") else host
    slurm = DEFAULT.read_text().format(
        auth=pod.choice(SETTING, MUNGE, [MUNGE, SLURM]),
        cluster=pod.setting("MINIVM_CLUSTER", "minivm"),
        host=host if known_as == host else f"{host}({known_as})",
        jwt=JWT if pod.has(f"{MOUNTS}/secrets/slurm/jwt_hs256.key") else "",
        accounting=""
        if accounting == "none"
        else ACCOUNTING.format(host=ACCOUNTING_POD if accounting == "pod" else known_as),
    )
    return {"slurm.conf": slurm, "cgroup.conf": DEFAULT_CGROUP, "gres.conf": DEFAULT_GRES}
