"""Steps for slurmdbd and the embedded database: write slurmdbd.conf, make the database, repair the cluster's number.

- `slurmdbd-config` writes slurmdbd.conf for the embedded or an external database.
- `mariadb` makes the embedded database and its user, before mariadbd starts.
- `cluster-number` runs before slurmctld starts. slurmctld's state and the database each hold the cluster's number; if
  they differ, slurmctld does not start. slurmdbd gives a new cluster its number when slurmctld registers. slurmctld
  takes a lost answer (the database died just then) for a success: it makes up a number and saves it. At its next start
  it sees both numbers and exits, so that two clusters never write into one state. A stamp tells if the two belong
  together: it is made when both are new or agree, and is stored in the state and beside the database. If the stamps
  match, the database's number is written into the state; otherwise the state may be another cluster's, and nothing is
  changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from ground.commands import ran
from ground.files import read_plain
from init.errors import InitError
from init.lean import record
from init.pod.auth import MUNGE, SETTING, SLURM
from init.pod.pod import MOUNTS, Pod, PrepareError, user, write
from init.prepare.boot import ensure
from init.slurm.accounting import CLIENT, SOCKET
from init.slurm.conf import setting
from init.slurm.place import CONFIGURATION, find_state_directory

TEMPLATE = "/usr/share/minivm/mysql"
DATA = "/var/lib/mysql"
INIT_FILE = "/run/minivm/mariadb.sql"
NAME = "slurm_acct_db"
PASSWORD = f"{MOUNTS}/secrets/slurmdbd/password"
STAMP = ".minivm-database"  # in the state
DATABASE_STAMP = f"{DATA}/.minivm-complete"  # marks a complete database; its text is the stamp
QUESTION = "SELECT name, id FROM cluster_table WHERE deleted = 0 AND id IS NOT NULL"
WITHIN = 5.0

# MariaDB identifies the user by the socket: the embedded database has no password that could leak.
SQL = f"""\
CREATE DATABASE IF NOT EXISTS {NAME};
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON {NAME}.* TO slurm@localhost;
"""


def slurmdbd(pod: Pod) -> str:
    """Write slurmdbd.conf; a mounted one is already installed and stays."""
    if pod.has(f"{MOUNTS}/config/slurm/slurmdbd.conf"):
        return "slurmdbd.conf is mounted"
    accounting = pod.accounting
    lines = [
        f"AuthType=auth/{pod.choice(SETTING, MUNGE, [MUNGE, SLURM])}",
        # localhost, not the pod's name: only this pod's slurmctld connects, and the name may not resolve yet.
        "DbdHost=localhost",
        "SlurmUser=slurm",
        "PidFile=/run/slurm/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        f"StorageLoc={pod.setting('MINIVM_DATABASE_NAME', NAME)}",
    ]
    lines += _external(pod) if accounting == "external" else ["StorageHost=localhost", "StorageUser=slurm"]
    data = "".join(f"{line}\n" for line in lines).encode()
    write(pod.path("/etc/slurm/slurmdbd.conf"), data, mode=0o600, owner=user("slurm"))
    return f"slurmdbd.conf for the {accounting} database"


def _external(pod: Pod) -> list[str]:
    """Return the lines that name an external database."""
    host = pod.setting("MINIVM_DATABASE_HOST")
    if not host:
        from init.errors import ConfigError

        problem = "MINIVM_ACCOUNTING=external needs MINIVM_DATABASE_HOST"
        raise ConfigError("write slurmdbd.conf", problem, hint="host or host:port of MariaDB or MySQL")
    name, colon, port = host.rpartition(":")
    port = port if colon else pod.setting("MINIVM_DATABASE_PORT")
    password = pod.text(PASSWORD)
    if password is None:
        raise PrepareError("write slurmdbd.conf", f"{PASSWORD} is missing", hint="mount the database password")
    return [
        f"StorageHost={name if colon else host}",
        *([f"StoragePort={port}"] if port else []),
        f"StorageUser={pod.setting('MINIVM_DATABASE_USER', 'slurm')}",
        f"StoragePass={quote(password.strip())}",
    ]


def quote(text: str) -> str:
    """Quote a value for Slurm's parser: `#` would start a comment, and a blank end the value."""
    text = re.sub(r"[\\#]", r"\\\g<0>", text)
    if not re.search(r"\s", text) and not text.startswith('"'):
        return text
    if '"' in text:
        raise PrepareError("write slurmdbd.conf", "a password with blanks and double quotes cannot be written there")
    return f'"{text}"'


def mariadb(pod: Pod) -> str:
    """Prepare the data directory as root before mariadbd starts: an empty one gets the image's tables."""
    uid, gid = user("mysql")
    data = pod.path(DATA)
    ensure(data, 0o700, uid, gid)
    write(pod.path(INIT_FILE), SQL.encode(), mode=0o644, owner=(0, 0))
    # The marker is written last, so that an interrupted copy never counts as a database.
    marker, copying = data / ".minivm-complete", data / ".minivm-copying"
    has_existing_database = (data / "ib_logfile0").exists() and not copying.exists()  # on a volume, not made here
    if marker.exists() or has_existing_database:
        return "the database is there"
    template = pod.path(TEMPLATE)
    for path in [*data.iterdir()]:
        if path.name == "lost+found":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    copying.touch()
    if template.is_dir():
        shutil.copytree(template, data, dirs_exist_ok=True)
        source = "copied from the image"
    else:
        _install(data)
        source = "made"
    for directory, names, files in os.walk(data):
        for name in [*names, *files]:
            os.chown(os.path.join(directory, name), uid, gid, follow_symlinks=False)  # noqa: PTH118 (os.walk's strings)
    marker.touch()
    copying.unlink(missing_ok=True)
    return f"a fresh database, {source}"


def _install(data: os.PathLike[str]) -> None:
    install = ["/usr/bin/mariadb-install-db", "--user=mysql", "--skip-test-db"]
    # As in the service (init/services/mariadb.yaml).
    install += ["--auth-root-authentication-method=socket", "--loose-innodb-buffer-pool-size-max=128M"]
    done = ran([*install, f"--datadir={data}"])
    if done.returncode:
        raise PrepareError("make the database", (done.stderr or done.stdout).strip()[-400:])


@record(frozen=True, slots=True)
class Numbers:
    """The cluster's number in slurmctld's state and in the embedded database (0: none yet), and the stamps of both."""

    in_state: int
    in_database: int
    has_jobs: bool
    state_stamp: str
    database_stamp: str

    @property
    def are_paired(self) -> bool:
        return self.state_stamp == self.database_stamp != ""

    @property
    def may_pair(self) -> bool:
        """True if the state is new, and so belongs to no other cluster, or if the numbers agree."""
        is_new_state = not self.in_state and not self.has_jobs and not self.state_stamp
        return not self.are_paired and (is_new_state or self.in_state == self.in_database != 0)

    @property
    def differ(self) -> bool:
        return 0 not in (self.in_state, self.in_database) and self.in_state != self.in_database


def repair_number(pod: Pod) -> str:
    """Repair the number; never fails, since slurmctld itself reports what cannot be repaired here."""
    if pod.accounting != "embedded" or pod.has(f"{MOUNTS}/config/slurm/slurmdbd.conf"):
        return "the site's own database keeps the cluster's number"
    try:
        return _repair_number(pod)
    except (InitError, OSError, ValueError, subprocess.SubprocessError) as error:
        return f"the cluster's number is not compared with the database's: {error}"


def _repair_number(pod: Pod) -> str:
    conf = pod.path(CONFIGURATION).read_text(errors="replace")
    cluster = setting(conf, "ClusterName").lower()
    state = find_state_directory(pod)
    if not cluster or not state.is_dir():
        return "there is no state yet"
    owner, _, number = _read_short(state / "clustername").partition("|")
    if owner and owner.lower() != cluster:
        return f"the state is of the cluster {owner}"
    numbers = Numbers(
        in_state=int(number) if number.isascii() and number.isdecimal() else 0,
        in_database=_ask_number(cluster),
        has_jobs=(state / "job_state").exists(),
        state_stamp=_read_short(state / STAMP),
        database_stamp=_read_short(pod.path(DATABASE_STAMP)),
    )
    if numbers.may_pair:
        stamp = numbers.database_stamp or os.urandom(16).hex()
        write(pod.path(DATABASE_STAMP), stamp.encode(), mode=0o600, owner=user("mysql"))
        write(state / STAMP, stamp.encode(), mode=0o600, owner=user("slurm"))
    if not numbers.differ:
        return f"the cluster's number is {numbers.in_state or numbers.in_database or 'not given yet'}"
    text = f"the cluster's number is {numbers.in_state} in the state and {numbers.in_database} in the database"
    if not numbers.are_paired:
        return f"{text}; this step cannot tell if they belong together, and changes neither"
    write(state / "clustername", f"{cluster}|{numbers.in_database}".encode(), mode=0o600, owner=user("slurm"))
    return f"{text}; they belong together, and the state has {numbers.in_database} now"


def _ask_number(cluster: str) -> int:
    """Ask the database for the cluster's number; 0 if it has none or does not answer."""
    uid, gid = user("slurm")
    argv = [CLIENT, "--no-defaults", f"--socket={SOCKET}", "--batch", "--skip-column-names", f"--execute={QUESTION}"]
    done = ran([*argv, NAME], within=WITHIN, user=uid, group=gid, extra_groups=[])
    match = re.search(rf"^{re.escape(cluster)}\t([0-9]{{1,5}})$", done.stdout, re.MULTILINE)
    return int(match[1]) if match else 0


def _read_short(path: Path) -> str:
    """Read a short file; slurm owns the directory and may have put anything there."""
    return (read_plain(path, 512) or b"").decode(errors="replace").strip()
