"""Compare the mounted keys with those that the daemons use. A Secret that changes reaches the mount, and no daemon.

    python3 -I -m init.helpers.keys

Taken at once, because it costs no session and no job and can be checked before: SSH host keys, the JWT key, and a
database password that the database accepts. The others are reported with what takes them: a cluster changes them in an
order that no pod knows. A daemon that still runs with the key before is reported too. Exit code 1 and one line, which
becomes the reason for which the pod is degraded. No key is ever printed.

The metrics tell since when the controller knows each key, and when certificates beside sssd.conf expire. A file that
is missing or cannot be read has no sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ground.certificates import list_expiries
from ground.commands import ran
from ground.files import read_json, write_if_possible, write_whole
from ground.metrics import family
from init.errors import InitError
from init.lean import record
from init.pod.client import Client, control_socket, service
from init.pod.pod import MOUNTS, Pod
from init.slurm import accounting
from init.slurm.conf import setting
from init.view.status import ServiceView

SECRETS = f"{MOUNTS}/secrets"
HOST_KEYS = "ssh_host_*_key"
LARGEST = 1 << 20
WITHIN = 30.0  # for a restart or a reload
# Which keys each daemon had when it was first seen; root's alone, as digests of keys are.
READ = "/run/minivm/keys.json"


@record(frozen=True, slots=True)
class Key:
    """A key: where it may be mounted and is installed, the way to take a new one, and the daemons that read it."""

    name: str
    mounted: tuple[str, ...]
    installed: str
    way: str
    readers: tuple[str, ...]
    beside: str = ""  # installed with it, or without it


RELOAD = "`minivm restart slurm-key`, then `scontrol reconfigure` on the controller takes it"
SLURM_KEY = "/etc/slurm/slurm.key"
SLURM = ("slurmctld", "slurmdbd", "slurmd", "slurmd-static", "sackd")
JWKS = ("slurm-key/slurm.jwks", "slurm-jwks/slurm.jwks")
JWT = Key("JWT key", ("slurm/jwt_hs256.key",), "/etc/slurm/jwt_hs256.key", "", ("slurmctld",))
JWT_BYTES = 32  # RFC 7518 for HS256
KEYS = (
    Key("munge key", ("munge/munge.key",), "/etc/munge/munge.key", "`minivm restart munged` takes it", ("munged",)),
    Key("slurm.key", ("slurm-key/slurm.key",), SLURM_KEY, RELOAD, SLURM),
    Key("slurm.jwks", JWKS, "/etc/slurm/slurm.jwks", RELOAD, SLURM, SLURM_KEY),
    Key("sssd.conf", ("sssd/sssd.conf",), "/etc/sssd/sssd.conf", "`minivm restart sssd` takes it", ("sssd",)),
)
PASSWORD = f"{SECRETS}/slurmdbd/password"
PREPARE = ("-I", "-m", "init.prepare")


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
        expected, used = digest(mounted), digest(pod.path(key.installed))
        # One that was never installed is its service's to tell, unless it came later than what is installed with it.
        is_installed = used or (key.beside and pod.path(key.beside).exists())
        if expected and is_installed and expected != used:
            yield f"the mounted {key.name} is not the one in use, since {since(mounted)}: {key.way}"


# Daemons that run with the key before.


def list_files(pod: Pod, service: str) -> dict[str, Path]:
    """Return the files that a daemon reads at its start alone, by the name of the key."""
    files = {key.name: pod.path(key.installed) for key in (*KEYS, JWT) if service in key.readers}
    if service == "sssd":  # certificates and keys beside sssd.conf are read where they are mounted
        for path in sorted(pod.path(f"{SECRETS}/sssd").glob("[!.]*")):
            if path.name != "sssd.conf" and path.is_file():
                files[path.name] = path
    if service == "sshd":
        files = {path.name: path for path in sorted(host_keys_directory(pod).glob(HOST_KEYS))}
    return files


def find_unread(pod: Pod, lives: Mapping[str, str], read: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the daemons whose keys changed since they started, with the keys' names.

    `read` holds for each daemon its process and the digests that it was first seen with. A daemon that was started
    anew, which is also how Slurm's daemons reconfigure, has read what is installed. No times are compared: clocks jump.
    """
    unread = {}
    for daemon, life in lives.items():
        now = [f"{name}={digest(path)}" for name, path in list_files(pod, daemon).items()]
        before = read.get(daemon, [])
        if not before or before[0] != life:
            read[daemon] = [life, *now]
        elif changed := [entry.partition("=")[0] for entry in now if entry not in before]:
            unread[daemon] = changed
    return unread


def tell_unread(unread: Mapping[str, list[str]]) -> Iterator[str]:
    for daemon, names in unread.items():
        yield f"{daemon} has not read the new {' and '.join(names)}: `minivm restart {daemon}` takes it"


def daemons(pod: Pod, views: Iterable[ServiceView]) -> dict[str, str]:
    """Return the running daemons that read keys, each with what tells its process from a later one."""
    readers = {"sshd", *(name for key in (*KEYS, JWT) for name in key.readers)}
    lives = {}
    for view in views:
        # A daemon that starts or reloads is looked at in the next turn.
        if view.name in readers and view.pid and view.state == "ready":
            fields = (pod.text(f"/proc/{view.pid}/stat") or "").rpartition(")")[2].split()
            if len(fields) > 19:
                lives[view.name] = f"{view.pid} {fields[19]}"
    return lives


def load(path: Path) -> dict[str, list[str]]:
    try:
        data = json.loads(path.read_text())
        return {str(name): [str(entry) for entry in entries] for name, entries in data.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # of a cut or an older one: what runs now is taken for right


# Keys that are taken at once.


def host_keys_directory(pod: Pod) -> Path:
    """Return the directory into which `init.prepare.ssh` installs them: a read-only /etc/ssh has none."""
    own = pod.path("/run/minivm/ssh")
    return own if own.is_dir() else pod.path("/etc/ssh")


def is_private_key(path: Path) -> bool:
    """Ask ssh-keygen, which reads no key that others may read, as a mounted one is."""
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(path.read_bytes()[:LARGEST])
        copy.flush()
        return ran(["/usr/bin/ssh-keygen", "-y", "-P", "", "-f", copy.name]).returncode == 0


def renew_host_keys(pod: Pod, control: Path, unread: list[str], read: dict[str, list[str]]) -> str:
    """Have sshd take new host keys; the reason where it cannot."""
    mounted = sorted(pod.path(f"{SECRETS}/ssh").glob(HOST_KEYS))
    directory = host_keys_directory(pod)
    changed = [path for path in mounted if digest(path) != digest(directory / path.name)]
    # Before the first start there is nothing to renew.
    if not any(directory.glob(HOST_KEYS)):
        return ""
    for path in changed:
        if not is_private_key(path):
            return f"the mounted {path.name} is no private key, and sshd keeps the one before: mend the Secret"
    # An earlier try may have been cut between the two steps.
    names = [path.name for path in changed] or unread
    if not names:
        return ""
    try:
        with Client(control, within=WITHIN) as client:
            client.request("restart", service="hostkeys", wait=True)
            client.request("reload", service="sshd", wait=True)
    except (InitError, EOFError, OSError) as error:
        return f"the mounted SSH host keys are not in use: {error}; tried again"
    read.pop("sshd", None)  # the process is the same, its keys are not
    print(f"sshd has taken {', '.join(names)}", file=sys.stderr)
    return ""


def renew_jwt(pod: Pod, control: Path) -> str:
    """Have slurmctld take a new JWT key: there is room for one alone, and the fleet signs with the mounted one."""
    mounted = pod.path(f"{SECRETS}/{JWT.mounted[0]}")
    expected, used = digest(mounted), digest(pod.path(JWT.installed))
    if not (expected and used) or expected == used:
        return ""
    size = mounted.stat().st_size
    if size < JWT_BYTES:
        return f"the mounted JWT key has {size} bytes, fewer than {JWT_BYTES}, and slurmctld keeps the one before"
    done = ran([sys.executable, *PREPARE, "jwt-key"], within=WITHIN)
    if done.returncode:
        return f"the mounted JWT key is not in use: {done.stderr.strip() or done.stdout.strip()}"
    # One that does not run reads it at its start, and one that refused runs with the key before.
    with contextlib.suppress(InitError, EOFError, OSError), Client(control, within=WITHIN) as client:
        client.request("reload", service="slurmctld", wait=True)
        print("slurmctld has taken the JWT key", file=sys.stderr)
    return ""


def renew_password(pod: Pod, control: Path) -> str:
    """Have slurmdbd take a new password of the accounting database once the database accepts it."""
    conf, mounted = pod.text(accounting.CONFIGURATION) or "", (pod.text(PASSWORD) or "").strip()
    used = setting(conf, "StoragePass")
    if not (mounted and used) or mounted == used:
        return ""
    if accounting.ask(conf, "SELECT 1", password=mounted) != "1":
        return (
            f"the mounted database password is not the one in use, since {since(pod.path(PASSWORD))}:"
            " slurmdbd takes it once the database accepts it"
        )
    try:
        with Client(control, within=WITHIN) as client:
            view = service(client, "slurmdbd")
            if view is None or view.state == "stopped":
                return ""  # an operator starts it, with what is mounted then
            reply = client.request("restart", service="slurmdbd", wait=True)
    except (InitError, EOFError, OSError) as error:
        return f"the mounted database password is not in use: {error}; tried again"
    if not reply.get("ready"):
        return f"slurmdbd is {reply.get('state')} with the mounted database password"
    print("slurmdbd has taken the database password", file=sys.stderr)
    return ""


def renew_node_sackd(control: Path, unread: Mapping[str, list[str]], read: dict[str, list[str]]) -> None:
    """Have a worker's sackd take a new key after slurmd: slurmctld reconfigures slurmd alone."""
    if "sackd" not in unread or not (running := read.keys() & {"slurmd", "slurmd-static"}) or running & unread.keys():
        return
    with contextlib.suppress(InitError, EOFError, OSError), Client(control, within=WITHIN) as client:
        client.request("reload", service="sackd", wait=True)
        print(f"sackd has taken {' and '.join(unread['sackd'])}", file=sys.stderr)


# Metrics: the age of keys, and the end of certificates.

METRICS = "/run/minivm/metrics.d/keys.prom"
# On the controller's volume, since a mounted Secret has the time of the pod's start.
SINCE = "/var/lib/minivm/slurm/keys.json"
EARLIEST = 1.7e9  # an earlier time is of a clock that was not set yet
DIGITS = 4  # of a digest: enough to see a change, too few to guess a key by


def read_since(pod: Pod, now: float) -> dict[str, float]:
    """Return the time from which each installed key is known, and keep it on the volume; nothing without the volume."""
    path = pod.path(SINCE)
    if not path.parent.is_dir():
        return {}
    kept = dict(read_json(path))
    since = {}
    for key in (*KEYS, JWT):
        used = digest(pod.path(key.installed))[:DIGITS]
        if not used or key.name == "sssd.conf" or now < EARLIEST:
            continue
        match kept.get(key.name):
            case [before, int() | float() as at] if before == used and EARLIEST < at <= now:
                since[key.name] = float(at)
            case _:
                since[key.name] = now
                kept[key.name] = [used, now]
    try:
        if now in since.values():
            write_whole(path, json.dumps(kept), mode=0o600)
    except OSError:
        return {}  # the next turn would take the key for new again
    return since


def render_metrics(since: Mapping[str, float], certificates: Mapping[str, float]) -> str:
    keys = [({"key": name}, f"{at:.0f}") for name, at in since.items()]
    ends = [({"file": f"sssd/{name}"}, f"{at:.0f}") for name, at in certificates.items()]
    lines = family("minivm_keys_known_timestamp_seconds", "Since when this key is in use, at least.", keys)
    lines += family("minivm_keys_certificate_end_timestamp_seconds", "End of the file's first certificate.", ends)
    return "\n".join(lines) + "\n"


def look(pod: Pod, control: Path, read: dict[str, list[str]]) -> dict[str, list[str]]:
    with Client(control, within=WITHIN) as client:
        views = client.snapshot().services
    return find_unread(pod, daemons(pod, views), read)


def compare(pod: Pod, control: Path) -> list[str]:
    """Take what can be taken, and return the reasons for which keys are not in use."""
    file = pod.path(READ)
    read = load(file)
    before = json.dumps(read)
    unread = look(pod, control, read)
    reasons = [
        *find_unused(pod),
        renew_host_keys(pod, control, unread.get("sshd", []), read),
        renew_jwt(pod, control),
        renew_password(pod, control),
    ]
    renew_node_sackd(control, unread, read)
    unread = look(pod, control, read)
    unread.pop("sshd", None)  # told above, and tried again
    reasons += tell_unread(unread)
    if json.dumps(read) != before:
        write_whole(file, json.dumps(read), mode=0o600)
    return reasons


def main() -> int:
    pod, now = Pod(os.environ), time.time()
    certificates = list_expiries(pod.path(f"{SECRETS}/sssd"))
    write_if_possible(pod.path(METRICS), render_metrics(read_since(pod, now), certificates))
    try:
        reasons = compare(pod, control_socket())
    except (InitError, EOFError) as error:
        reasons = [f"the keys in use are not known: {error}"]
    if text := "; ".join(filter(None, reasons)):
        print(text)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
