"""Compare the mounted keys with those that the daemons use. A Secret that changes reaches the mount, and no daemon.

    python3 -I -m init.helpers.keys

New SSH host keys are taken at once, for sessions stay and every key is checked before. The others are told with what
takes them: a cluster changes them in an order that no pod knows. Exit code 1 and one line, which becomes the reason for
which the pod is degraded. No key is ever printed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ground.commands import ran
from init.errors import InitError
from init.pod.client import Client, control_socket
from init.pod.pod import MOUNTS, Pod
from init.records import record

SECRETS = f"{MOUNTS}/secrets"
HOST_KEYS = "ssh_host_*_key"
LARGEST = 1 << 20


@record(frozen=True, slots=True)
class Key:
    """A key: where it may be mounted and is installed, and the way to take a new one."""

    name: str
    mounted: tuple[str, ...]
    installed: str
    way: str
    beside: str = ""  # installed with it, or without it


NEW_POD = "delete the pod to take it"
RELOAD = "`minivm restart slurm-key`, then `scontrol reconfigure` on the controller takes it"
SLURM_KEY = "/etc/slurm/slurm.key"
KEYS = (
    Key("munge key", ("munge/munge.key",), "/etc/munge/munge.key", "`minivm restart munged` takes it"),
    Key("slurm.key", ("slurm-key/slurm.key",), SLURM_KEY, RELOAD),
    Key("slurm.jwks", ("slurm-key/slurm.jwks", "slurm-jwks/slurm.jwks"), "/etc/slurm/slurm.jwks", RELOAD, SLURM_KEY),
    Key("JWT key", ("slurm/jwt_hs256.key",), "/etc/slurm/jwt_hs256.key", NEW_POD),
    Key("sssd.conf", ("sssd/sssd.conf",), "/etc/sssd/sssd.conf", "`minivm restart sssd` takes it"),
)


def digest(path: Path) -> str:
    """Empty for a file that is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(LARGEST)).hexdigest()
    except OSError:
        return ""


def since(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(path.stat().st_mtime))


def find_unused(pod: Pod) -> Iterator[str]:
    for key in KEYS:
        places = [pod.path(f"{SECRETS}/{path}") for path in key.mounted]
        mounted = next(filter(Path.exists, places), places[0])
        wanted, used = digest(mounted), digest(pod.path(key.installed))
        # One that was never installed is its service's to tell, unless it came later than what is installed with it.
        is_installed = used or (key.beside and pod.path(key.beside).exists())
        if wanted and is_installed and wanted != used:
            yield f"the mounted {key.name} is not the one in use, since {since(mounted)}: {key.way}"


def host_keys_directory(pod: Pod) -> Path:
    """Where `init.prepare.hostkeys` installs them: a read-only /etc/ssh has none."""
    own = pod.path("/run/minivm/ssh")
    return own if own.is_dir() else pod.path("/etc/ssh")


def is_private_key(path: Path) -> bool:
    """Ask ssh-keygen, which reads no key that others may read, as a mounted one is."""
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(path.read_bytes()[:LARGEST])
        copy.flush()
        return ran(["/usr/bin/ssh-keygen", "-y", "-P", "", "-f", copy.name]).returncode == 0


def renew_host_keys(pod: Pod, control: Path) -> str:
    """Have sshd take new host keys; the reason where it cannot."""
    mounted = sorted(pod.path(f"{SECRETS}/ssh").glob(HOST_KEYS))
    directory = host_keys_directory(pod)
    changed = [path for path in mounted if digest(path) != digest(directory / path.name)]
    # Before the first start there is nothing to renew.
    if not changed or not any(directory.glob(HOST_KEYS)):
        return ""
    for path in changed:
        if not is_private_key(path):
            return f"the mounted {path.name} is no private key, and sshd keeps the one before: mend the Secret"
    try:
        with Client(control, within=30.0) as client:
            client.request("restart", service="hostkeys", wait=True)
            client.request("reload", service="sshd", wait=True)
    except (InitError, EOFError, OSError) as error:
        return f"the mounted SSH host keys are not in use: {error}; tried again"
    print(f"sshd has taken {', '.join(path.name for path in changed)}", file=sys.stderr)
    return ""


def main() -> int:
    pod = Pod(os.environ)
    reasons = [*find_unused(pod), renew_host_keys(pod, control_socket())]
    if told := "; ".join(filter(None, reasons)):
        print(told)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
