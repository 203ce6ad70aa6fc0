"""Checks before slurmctld and slurmdbd start: may they take over an earlier Slurm's state? Reads only."""

from __future__ import annotations

from ground.files import read_plain
from init.errors import ConfigError
from init.fields import number
from init.pod import release as slurm
from init.pod.pod import Pod
from init.slurm.conf import setting

STATE = "/var/spool/slurmctld"
CONFIGURATION = "/etc/slurm/slurm.conf"
DATABASE = "/etc/slurm/slurmdbd.conf"
CLIENT = "/usr/bin/mariadb"
SOCKET = "/run/mysqld/mysqld.sock"
PATIENCE = 8.0
# slurmdbd records the message version of each controller that has connected.
QUESTION = "SELECT MAX(rpc_version) FROM cluster_table WHERE deleted = 0"


def run(pod: Pod) -> str:
    """Check slurmctld's state, at the path in the installed slurm.conf."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmctld checks its state itself"
    directory = pod.path(setting(pod.text(CONFIGURATION) or "", "StateSaveLocation") or STATE)
    # The volume belongs to the Slurm user, who may have put anything there.
    files = (*slurm.HEADED, *slurm.BARE)
    headers = {name: read_plain(directory / name, slurm.HEADER) or b"" for name in files}
    left = slurm.written_by(headers)
    _refuse(release, left, "slurmctld's state")
    return "no state yet" if left is None else f"the state is of Slurm {release.called(left)}"


def accounting(pod: Pod) -> str:
    """Check the accounting database; if it does not answer now, slurmdbd waits for it."""
    release = known(pod)
    if release is None:
        return "this Slurm release is unknown: slurmdbd checks its database itself"
    answer = number(ask(pod.text(DATABASE) or ""))
    left = answer >> 8 if answer else None
    _refuse(release, left, "the accounting database")
    return "no controller is known to it" if left is None else f"it served Slurm {release.called(left)}"


def known(pod: Pod) -> slurm.Release | None:
    text = pod.text(slurm.FILE)
    return slurm.of_json(text) if text else None


def _refuse(release: slurm.Release, left: int | None, what: str) -> None:
    reason, hint = slurm.refusal(release, left, what)
    if reason:
        raise ConfigError(f"start Slurm {release.name}", reason, hint=hint)


def ask(conf: str, question: str = QUESTION) -> str:
    """Query the database; "" if it is empty or does not answer. The password is in no command line."""
    from subprocess import TimeoutExpired

    from ground.commands import ran

    host, user = setting(conf, "StorageHost") or "localhost", setting(conf, "StorageUser") or "slurm"
    where = ["--socket", SOCKET] if host == "localhost" else ["--host", host]
    if port := setting(conf, "StoragePort"):
        where += ["--port", port]
    password = setting(conf, "StoragePass")
    # The embedded one identifies users by their sockets: root is its root.
    credentials = ["--user", user] if password else ["--user", "root"]
    name = setting(conf, "StorageLoc") or "slurm_acct_db"
    argv = [CLIENT, "--no-defaults", "--batch", "--skip-column-names", "--connect-timeout=5", *where, *credentials,
            "--execute", question, name]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"} | ({"MYSQL_PWD": password} if password else {})
    try:
        done = ran(argv, env=env, within=PATIENCE)
    except (OSError, TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
