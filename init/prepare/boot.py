"""First steps of each boot, for the service `pod`, in the order of its service file.

- `users`: give Slurm's own user the number that the cluster has for it
- `directories`: those that daemons require, with the owner and mode without which they exit
- `stale`: remove what a killed container left behind
- `identity`: publish the pod's name and addresses
- `profile`: give users' login shells some of the pod's environment

Nothing here waits for the network.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from init.errors import ConfigError
from init.fields import number
from init.pod.addresses import join_address
from init.pod.pod import Pod, PrepareError, user, writable, write

TABLE = Path(__file__).with_name("directories.conf")
SLURM_UID = "MINIVM_SLURM_UID"
SLURM_HOME = "/var/lib/slurm"


def number_users(pod: Pod) -> str:
    """Give the user slurm the uid and gid of MINIVM_SLURM_UID, for a cluster whose other pods have that number.

    A slurmd obeys the uid of its own user slurm alone, and a state on a volume belongs to it. Only SLURM_HOME keeps the
    number of the image: the other directories are repaired in `directories`.
    """
    wanted = pod.setting(SLURM_UID)
    if not wanted:
        return "as in the image"
    import re

    uid = number(wanted)
    if uid is None or not 0 < uid < 60000:
        raise ConfigError("number the user slurm", f"{SLURM_UID} is {wanted!r}, expected 1 to 59999")
    before = user("slurm")
    if before == (uid, uid):
        return f"slurm is {uid} already"
    ids = {"/etc/group": f"{uid}", "/etc/passwd": f"{uid}:{uid}"}
    texts = {file: pod.text(file) or "" for file in ids}
    for file, text in texts.items():
        if taken := re.search(rf"^((?!slurm:)[^:]+):[^:]*:{uid}:", text, re.MULTILINE):
            raise ConfigError("number the user slurm", f"{uid} is {taken[1]} in {file}", hint=f"change {SLURM_UID}")
    for file, text in texts.items():
        old = r":\d+" * len(ids[file].split(":"))
        changed = re.sub(rf"^(slurm:[^:]*){old}", rf"\g<1>:{ids[file]}", text, flags=re.MULTILINE)
        write(pod.path(file), changed.encode(), mode=0o644, owner=(0, 0))
    for path in [pod.path(SLURM_HOME), *pod.path(SLURM_HOME).rglob("*")]:
        if path.lstat().st_uid == before[0]:
            os.chown(path, uid, uid, follow_symlinks=False)
    return f"slurm is {uid}, was {before[0]}"


def make_directories(pod: Pod) -> str:
    """Make and repair the directories of directories.conf, for the programs that this image has."""
    created = 0
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, mode, owner, *programs = line.split()
        if all(pod.has(program.lstrip("!")) != program.startswith("!") for program in programs):
            uid, gid = find_owner(owner)
            created += ensure(pod.path(name), int(mode, 8), uid, gid)
    return f"{created} directories created or repaired"


def find_owner(text: str) -> tuple[int, int]:
    """Return the ids of `USER`, with its own group, or of `USER:GROUP`, a group named like its user."""
    name, _, group = text.partition(":")
    uid, gid = (0, 0) if name == "root" else user(name)
    return (uid, user(group)[1]) if group else (uid, gid)


def ensure(path: Path, mode: int, uid: int, gid: int) -> bool:
    """Create or fix a directory; True if anything changed. A correct one is not touched: the root may be read-only."""
    try:
        changed = False
        if not path.is_dir():
            path.mkdir(parents=True, mode=mode)
            changed = True
        if os.geteuid() != 0:
            return changed  # a pod that runs as one ordinary user: its volumes have the owner that they have
        status = path.stat()
        if (status.st_uid, status.st_gid) != (uid, gid):
            os.chown(path, uid, gid)
            changed = True
        if status.st_mode & 0o7777 != mode:
            path.chmod(mode)
            changed = True
    except OSError as error:
        raise PrepareError(
            f"prepare {path}", error.strerror or str(error), hint="with a read-only root, mount a tmpfs there"
        ) from error
    return changed


# Files that a killed container left behind and a daemon would believe.
#
# sssd exits 0, silently, when another process has the pid of its old file; munged refuses an existing socket; old pid
# files name unrelated processes; a login pod that drained keeps /run/nologin.
STALE_FILES = (
    "/run/sssd.pid",
    "/run/munge/munge.socket.2",
    "/run/munge/munge.socket.2.lock",
    "/run/munge/munged.pid",
    "/run/slurm/sack.socket",
    "/run/slurmctld/sack.socket",
    "/run/slurmdbd/sack.socket",
    "/run/nologin",
    "/etc/nologin",
    "/run/sshd.pid",
    "/run/mysqld/mysqld.pid",
    "/run/mysqld/mysqld.sock",
)
STALE_PATTERNS = (("/run/slurm", "*.pid"), ("/run/slurmd", "*.pid"), ("/run/slurmctld", "*.pid"))
# The life in which the files were last checked: run again in a running pod, this step would remove sockets in use.
LIFE_MARKER = "/run/minivm/life"


def life(pod: Pod) -> str:
    """Identify the machine's boot and PID 1's start: a restarted container is another life."""
    start = (pod.text("/proc/1/stat") or "").rpartition(")")[2].split()
    return f"{(pod.text('/proc/sys/kernel/random/boot_id') or '').strip()} {start[19] if len(start) > 19 else ''}"


def remove_stale(pod: Pod) -> str:
    """Remove the files, once in each life of the pod."""
    now = life(pod)
    if pod.text(LIFE_MARKER) == now:
        return "already done in this life of the pod"
    removed = []
    candidates = [pod.path(name) for name in STALE_FILES]
    for directory, pattern in STALE_PATTERNS:
        candidates += sorted(pod.path(directory).glob(pattern))
    for path in candidates:
        if path.is_symlink() or path.exists():
            path.unlink()
            removed.append(path.name)
    write(pod.path(LIFE_MARKER), now.encode(), mode=0o644)
    return f"removed {', '.join(removed)}" if removed else "nothing stale"


def publish_identity(pod: Pod) -> str:
    """Publish the pod's name and addresses to the services that need them."""
    name = pod.name
    host, port = pod.controller
    address = pod.setting("MINIVM_POD_IP") or find_own_address()
    pod.publish(
        "pod",
        {"MINIVM_POD_NAME": name, "MINIVM_POD_IP": address, "MINIVM_CONTROLLER_ADDRESS": join_address(host, port)},
    )
    notes = [f"{name} at {address or 'no address'}"]
    if os.uname().nodename.split(".")[0] != name:
        notes.append(f"host name is {os.uname().nodename}")
    if address and not _hosts_file_names(pod, address):
        notes.append(f"/etc/hosts does not name {address}")
    return ", ".join(notes)


def find_own_address() -> str:
    """Return the source address of outgoing packets; sends no packet."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _hosts_file_names(pod: Pod, address: str) -> bool:
    return any(line.split()[:1] == [address] for line in (pod.text("/etc/hosts") or "").splitlines())


# The profile of login shells. A login shell starts clean and would miss the pod's environment.
#
# Variables that jobs and shells may see. All others, Kubernetes' tokens above all, stay in PID 1.
PROFILE_PREFIXES = ("NCCL_", "UCX_", "OMPI_MCA_", "PMIX_MCA_", "NVIDIA_", "CUDA_", "MINIVM_USER_")
PROFILE_NAMES = frozenset(
    {"TZ", "LANG", "LC_ALL", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)
CUDA = "/usr/local/cuda"
PROFILE = "/run/minivm/profile.sh"
# Every login shell reads this file. It is the same in every pod, so an image may contain it for a read-only root.
PROFILE_HOOK = "/etc/profile.d/minivm.sh"
PROFILE_HOOK_TEXT = b"[ ! -r /run/minivm/profile.sh ] || . /run/minivm/profile.sh\n"


def write_profile(pod: Pod) -> str:
    """Write the file that gives users' shells the chosen variables, and the hook that reads it."""
    values = users_variables(pod.env)
    lines = ["# Written at boot by minivm from the pod's environment.\n"]
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
    if pod.has(f"{CUDA}/bin"):
        lines.append(f'case ":$PATH:" in *:{CUDA}/bin:*) ;; *) export PATH="$PATH:{CUDA}/bin" ;; esac\n')
    write(pod.path(PROFILE), "".join(lines).encode(), mode=0o644, owner=(0, 0))
    hook = pod.path(PROFILE_HOOK)
    if not hook.exists():
        if not writable(hook.parent):
            return f"{len(values)} variables, and a read-only root without {PROFILE_HOOK}: users' shells miss them"
        write(hook, PROFILE_HOOK_TEXT, mode=0o644, owner=(0, 0))
    return f"{len(values)} variables for users' shells"


def users_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Select the variables: MINIVM_USER_X=1 reaches users as X=1, others under their own names."""
    selected = {}
    for name, value in env.items():
        if name in PROFILE_NAMES or name.startswith(PROFILE_PREFIXES):
            own_name = name.removeprefix("MINIVM_USER_")
            if own_name.replace("_", "a").isalnum() and not own_name[:1].isdecimal():
                selected[own_name] = value
    return selected
