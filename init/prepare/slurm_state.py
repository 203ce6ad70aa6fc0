"""Before slurmctld and slurmdbd start: is what an earlier Slurm left theirs to take over? It only reads."""

from __future__ import annotations

import os
import re

from init.errors import ConfigError
from init.fields import number
from init.pod.pod import Pod
from init.prepare import release as slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

STATE = "/var/spool/slurmctld"
CONFIGURATION = "/etc/slurm/slurm.conf"
DATABASE = "/etc/slurm/slurmdbd.conf"
CLIENT = "/usr/bin/mariadb"
SOCKET = "/run/mysqld/mysqld.sock"
PATIENCE = 8.0
# What slurmdbd notes of each controller that has spoken to it: the number of its messages.
QUESTION = "SELECT MAX(rpc_version) FROM cluster_table WHERE deleted = 0"


def run(pod: Pod) -> str:
    """slurmctld's state: by slurm.conf, which is installed already."""
    release = known(pod)
    if release is None:
        return "nothing is known of this Slurm's state: it judges for itself"
    directory = pod.path(_setting(pod.text(CONFIGURATION) or "", "StateSaveLocation") or STATE)
    headers = {name: head(directory / name) for name in (*slurm.HEADED, *slurm.BARE)}
    left = slurm.written_by(headers)
    _refuse(release, left, "slurmctld's state")
    return "no state yet" if left is None else f"the state is of Slurm {release.called(left)}"


def accounting(pod: Pod) -> str:
    """The accounting database: one that cannot be asked now is slurmdbd's to wait for."""
    release = known(pod)
    if release is None:
        return "nothing is known of this Slurm's database: it judges for itself"
    answer = number(ask(pod.text(DATABASE) or ""))
    left = answer >> 8 if answer else None
    _refuse(release, left, "the accounting database")
    return "no controller is known to it" if left is None else f"it served Slurm {release.called(left)}"


def known(pod: Pod) -> slurm.Release | None:
    text = pod.text(slurm.FILE)
    return slurm.of_json(text) if text else None


def _refuse(release: slurm.Release, left: int | None, what: str) -> None:
    why, hint = slurm.refusal(release, left, what)
    if why:
        raise ConfigError(f"start Slurm {release.name}", why, hint=hint)


def head(path: Path) -> bytes:
    """Of a plain file; the volume is the Slurm user's, who may have put anything there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        plain = os.fstat(descriptor).st_mode & 0o170000 == 0o100000
        return os.read(descriptor, slurm.HEADER) if plain else b""
    finally:
        os.close(descriptor)


def ask(conf: str) -> str:
    """The answer, or nothing: an empty database, or none that answers. The password is in no command line."""
    import subprocess

    host, user = _setting(conf, "StorageHost") or "localhost", _setting(conf, "StorageUser") or "slurm"
    where = ["--socket", SOCKET] if host == "localhost" else ["--host", host]
    if port := _setting(conf, "StoragePort"):
        where += ["--port", port]
    password = _setting(conf, "StoragePass")
    # The embedded one knows people by their sockets: root is its root.
    who = ["--user", user] if password else ["--user", "root"]
    name = _setting(conf, "StorageLoc") or "slurm_acct_db"
    argv = [CLIENT, "--no-defaults", "--batch", "--skip-column-names", "--connect-timeout=5", *where, *who,
            "--execute", QUESTION, name]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"} | ({"MYSQL_PWD": password} if password else {})
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              env=env, timeout=PATIENCE, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _setting(conf: str, name: str) -> str:
    """The last line of that name, as Slurm's parser reads it: `\\#` is no comment, quotes hold blanks."""
    found = ""
    for line in conf.splitlines():
        line = re.split(r"(?<!\\)#", line, maxsplit=1)[0].strip()
        key, equals, value = line.partition("=")
        if equals and key.strip().lower() == name.lower():
            found = re.sub(r"\\([\\#])", r"\1", value.strip().strip('"'))
    return found
