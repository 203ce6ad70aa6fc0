"""Check that the accounting database answers; slurmdbd keeps its port open even without its database.

    python3 -I -m init.slurm.accounting

On failure the exit code is 1, and the only line is the reason for the pod's degraded state. `ask` queries the database
itself, for steps that run while slurmdbd does not.
"""

from __future__ import annotations

import subprocess
import sys

from ground.commands import ran
from init.pod.addresses import find_crowd
from init.slurm.conf import setting

# Any request for which slurmdbd needs its database.
QUESTION = ("/usr/bin/sacctmgr", "--noheader", "show", "cluster")
PATIENCE = 8.0
PORT = 6819
LOST = "Unable to connect to database"
CONFIGURATION = "/etc/slurm/slurmdbd.conf"
CLIENT = "/usr/bin/mariadb"
SOCKET = "/run/mysqld/mysqld.sock"


def describe_problem(code: int, stderr: str) -> str:
    """Return what a person must know about the answer; "" if it is fine."""
    if code == 0:
        return ""
    if LOST in stderr:
        return "slurmdbd cannot reach its database; jobs continue, and their accounting is recorded when it is back"
    return "slurmdbd does not answer; jobs continue, and their accounting is recorded when it is back"


def connection(conf: str, password: str = "") -> tuple[list[str], str, str]:
    """Return the options, the password and the database's name for a client of slurmdbd.conf's database.

    `password`: another one than the configuration has.
    """
    host, user = setting(conf, "StorageHost") or "localhost", setting(conf, "StorageUser") or "slurm"
    where = ["--socket", SOCKET] if host == "localhost" else ["--host", host]
    if port := setting(conf, "StoragePort"):
        where += ["--port", port]
    password = password or setting(conf, "StoragePass")
    # The embedded one identifies users by their sockets: root is its root.
    credentials = ["--user", user] if password else ["--user", "root"]
    return ["--no-defaults", *where, *credentials], password, setting(conf, "StorageLoc") or "slurm_acct_db"


def ask(conf: str, question: str, *, password: str = "") -> str:
    """Return the database's answer; "" if it is empty or there is none. The password is in no command line."""
    options, password, name = connection(conf, password)
    argv = [CLIENT, *options, "--batch", "--skip-column-names", "--connect-timeout=5", "--execute", question, name]
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"} | ({"MYSQL_PWD": password} if password else {})
    try:
        done = ran(argv, env=env, within=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    try:
        done = ran(QUESTION, within=PATIENCE)
        problem = describe_problem(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        crowd = find_crowd(PORT)
        problem = f"slurmdbd has not answered within {PATIENCE:.0f} s; jobs continue" + (f"; {crowd}" if crowd else "")
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
