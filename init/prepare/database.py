"""slurmdbd.conf, and for the embedded database its first files and the one user that may use it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from init.pod.pod import MOUNTS, Pod, PrepareError, user, write
from init.prepare.directories import ensure

TEMPLATE = "/usr/share/minivm/mysql"
DATA = "/var/lib/mysql"
INIT_FILE = "/run/minivm/mariadb.sql"
NAME = "slurm_acct_db"
PASSWORD = f"{MOUNTS}/secrets/slurmdbd/password"

# The socket tells MariaDB who asks: the embedded database has no password that could leak.
SQL = f"""\
CREATE DATABASE IF NOT EXISTS {NAME};
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON {NAME}.* TO slurm@localhost;
"""


def slurmdbd(pod: Pod) -> str:
    """A mounted slurmdbd.conf has been installed as it is and stays."""
    if pod.has(f"{MOUNTS}/config/slurm/slurmdbd.conf"):
        return "slurmdbd.conf is mounted"
    accounting = pod.choice("MINIVM_ACCOUNTING", "embedded", ["embedded", "external", "none"])
    lines = [
        "AuthType=auth/munge",
        # localhost and not the pod's name: only this pod's slurmctld speaks to it, and the name may not resolve yet.
        "DbdHost=localhost",
        "SlurmUser=slurm",
        "PidFile=/run/slurm/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        f"StorageLoc={pod.setting('MINIVM_DATABASE_NAME', NAME)}",
    ]
    if accounting == "external":
        host = pod.setting("MINIVM_DATABASE_HOST")
        if not host:
            from init.errors import ConfigError

            why = "MINIVM_ACCOUNTING=external needs MINIVM_DATABASE_HOST"
            raise ConfigError("write slurmdbd.conf", why, hint="host or host:port of MariaDB or MySQL")
        name, colon, port = host.rpartition(":")
        port = port if colon else pod.setting("MINIVM_DATABASE_PORT")
        lines.append(f"StorageHost={name if colon else host}")
        lines += [f"StoragePort={port}"] if port else []
        lines.append(f"StorageUser={pod.setting('MINIVM_DATABASE_USER', 'slurm')}")
        password = pod.text(PASSWORD)
        if password is None:
            raise PrepareError("write slurmdbd.conf", f"{PASSWORD} is missing", hint="mount the database password")
        lines.append(f"StoragePass={quoted(password.strip())}")
    else:
        lines += ["StorageHost=localhost", "StorageUser=slurm"]
    data = "".join(f"{line}\n" for line in lines).encode()
    write(pod.path("/etc/slurm/slurmdbd.conf"), data, mode=0o600, owner=user("slurm"))
    return f"slurmdbd.conf for the {accounting} database"


def quoted(text: str) -> str:
    """As Slurm's parser reads it back whole: `#` would begin a comment, and a blank end the value."""
    text = re.sub(r"[\\#]", r"\\\g<0>", text)
    if not re.search(r"\s", text) and not text.startswith('"'):
        return text
    if '"' in text:
        raise PrepareError("write slurmdbd.conf", "a password with blanks and double quotes cannot be written there")
    return f'"{text}"'


def mariadb(pod: Pod) -> str:
    """Runs as root before mariadbd starts: an empty data directory gets the tables that the image made."""
    uid, gid = user("mysql")
    data = pod.path(DATA)
    ensure(data, 0o700, uid, gid)
    write(pod.path(INIT_FILE), SQL.encode(), mode=0o644, owner=(0, 0))
    # A copy that was cut half way must not pass for a database: the marker is written last.
    marker = data / ".minivm-complete"
    if marker.exists() or ((data / "ib_logfile0").exists() and not _ours(data)):
        return "the database is there"
    template = pod.path(TEMPLATE)
    for path in [*data.iterdir()]:
        if path.name == "lost+found":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (data / ".minivm-copying").touch()
    if template.is_dir():
        shutil.copytree(template, data, dirs_exist_ok=True, copy_function=_copy)
        source = "copied from the image"
    else:
        _install(data)
        source = "made"
    for directory, names, files in os.walk(data):
        for name in [*names, *files]:
            os.chown(os.path.join(directory, name), uid, gid, follow_symlinks=False)  # noqa: PTH118 (os.walk's strings)
    marker.touch()
    (data / ".minivm-copying").unlink(missing_ok=True)
    return f"a fresh database, {source}"


def _ours(data: os.PathLike[str]) -> bool:
    """Whether it is an unfinished copy of ours, and not somebody's database on a volume."""
    return os.path.exists(os.path.join(data, ".minivm-copying"))  # noqa: PTH110, PTH118 - as above


def _copy(source: str, target: str) -> str:
    return str(shutil.copy2(source, target))


def _install(data: os.PathLike[str]) -> None:
    done = subprocess.run(
        [
            "/usr/bin/mariadb-install-db",
            "--user=mysql",
            "--skip-test-db",
            "--auth-root-authentication-method=socket",
            f"--datadir={data}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PrepareError("make the database", (done.stderr or done.stdout).strip()[-400:])
