"""`minivm accounting` between real databases: what is cut goes on, and what would lose records is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

HOST = "slurm-accounting"
DATABASE = "slurm_acct_db"
FILE, BACK = "/tmp/first.sql", "/tmp/back.sql"
OUT, IN = "minivm accounting move-out", "minivm accounting move-in"
LOCK = "/run/minivm/accounting-move.lock"
MARK = "/var/lib/mysql/.minivm-records"
EXTERNAL_MARK = "/var/lib/minivm/slurm/records"

# Each from its first word on: this script has the commands in it, too, and must not match. bash of Debian 13 may turn
# for ever in `kill %1` when a process of the job has ended already.
KILL = "kill -9 $(pgrep -f '^/opt/minivm/bin/python3 .* accounting move-in') && pkill -f '^sleep 600$'"
# The load has begun when it is killed: its stdin gives no more than the beginning.
KILLED_WHILE_IT_LOADS = f"""
(head -c 20000 {FILE}; sleep 600) | {IN} &
for attempt in $(seq 2400); do grep -q loading {MARK} && pgrep mariadb$ && break; sleep 0.05; done
{KILL}
"""
BIOLOGY = """
INSERT INTO acct_table SELECT creation_time, mod_time, deleted, flags, 'biology', description, organization
FROM acct_table WHERE name = 'physics'
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, "move") as site:
        site.configure({"slurm.conf": slurm_conf()})
        yield site


def accounting(made: World, host: str = HOST, **options: Any) -> Pod:
    env = {"MINIVM_ACCOUNTING": "embedded", "MINIVM_CONTROLLER": host, "MINIVM_ACCOUNTING_FROM": "embedded"}
    return made.pod("accounting", host, env=env, **options)


def shell(pod: Pod, command: str) -> tuple[int, str]:
    return pod.code("bash", "-o", "pipefail", "-c", command)


def refused(pod: Pod, command: str, reason: str) -> None:
    code, text = shell(pod, command)
    assert code == 1 and reason in text, (code, text)
    assert pod.service("slurmdbd")["state"] != "ready"


def carry(path: str, source: Pod, target: Pod) -> None:
    stream, _ = source.container.get_archive(path)
    assert target.container.put_archive("/tmp", b"".join(stream))


def accounts(pod: Pod) -> set[str]:
    return set(pod.run("mariadb", "-N", "-e", "SELECT name FROM acct_table", "slurm_acct_db").split())


def waits_for_records(pod: Pod, reason: str) -> None:
    pod.container.restart(timeout=30)
    until(lambda: reason in pod.code("minivm", "why", "slurmdbd")[1], "it says why", seen=pod.account)
    assert pod.code("minivm", "start", "slurmdbd")[0] == 1


def test_records_go_and_come_back_whatever_is_cut(made: World) -> None:
    old = made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "embedded"}).wait_ready()
    until(lambda: old.service("slurmdbd")["state"] == "ready", "slurmdbd is ready", seen=old.account)
    old.run("sacctmgr", "-i", "add", "account", "physics,chemistry")
    new = accounting(made)
    out_of(old)
    new.wait_reason("waits for the records of the embedded database")
    new.run("minivm", "stop", "mariadb")
    assert shell(new, f"{OUT} > {BACK}")[0] == 3, "no record has arrived here, and the database need not say so"
    new.run("minivm", "start", "mariadb")
    carry(FILE, old, new)
    into(new)
    back(old, new)

    # A move that is given up.
    assert shell(old, f"{OUT} > {FILE}")[0] == 0
    assert "records: its records were moved out on" in old.code("minivm", "why")[1]
    assert old.run("minivm", "accounting", "reopen", "--yes") == "slurmdbd uses this database again\n"
    until(lambda: old.service("slurmdbd")["state"] == "ready", "slurmdbd is ready", seen=old.account)
    assert "records" not in old.code("minivm", "why")[1]

    # A volume without room: nothing is touched, for slurmctld's state may be on it.
    volume = Mount("/var/lib/mysql", None, type="tmpfs", tmpfs_size=256 << 20)
    small = accounting(made, "small", extra_mounts=[volume])
    small.wait_reason("waits for the records")
    shell(small, "dd if=/dev/zero of=/var/lib/mysql/fill bs=1M")
    carry(FILE, old, small)
    refused(small, f"{IN} < {FILE}", "that stay free")
    assert small.code("test", "-e", MARK)[0] == 1


def out_of(old: Pod) -> None:
    """One at a time, and a cut one writes the same again."""
    code, text = shell(old, f"flock {LOCK} {OUT} > {FILE}")
    assert code == 1 and "another move of records is running" in text
    assert old.service("slurmdbd")["state"] == "ready"
    code, text = shell(old, f"{OUT} | head -c 100 > {FILE}")
    assert code == 1 and "run this again" in text
    first = old.run("cat", FILE)
    assert old.run("stat", "-c", "%a %U", MARK).split() == ["600", "root"]
    assert shell(old, f"{OUT} > {FILE}")[0] == 0
    whole = old.run("cat", FILE)
    assert whole.startswith(first) and re.search(r"\n-- minivm end: [0-9a-f]{64}\n$", whole)
    waits_for_records(old, "its records were moved out on")
    old.wait_ready()  # jobs go on without slurmdbd


def into(new: Pod) -> None:
    """Nothing but these records, whole; a cut leaves the database closed."""
    refused(new, f"tail -n +2 {FILE} | {IN}", "the first line is not")
    refused(new, f"sed '1s/cluster.: .minivm/&x/' {FILE} | {IN}", "they are of the cluster minivmx")
    assert new.code("test", "-e", MARK)[0] == 1, "nothing was changed so far"
    refused(new, f"head -n -3 {FILE} | {IN}", "the file is not whole")
    assert "records: a load of its records was cut" in new.code("minivm", "why")[1]
    refused(new, f"sed s/chemistry/alchemy/ {FILE} | {IN}", "the file is not whole")
    refused(new, f"sed '1s/\"acct_table\": /&1/' {FILE} | {IN}", "the file is not whole")
    waits_for_records(new, "a load of its records was cut")
    new.run("rm", MARK)
    refused(new, f"{IN} < {FILE}", "did not make itself, in acct_table")
    new.run("mariadb", "-e", f"DROP DATABASE {DATABASE}; CREATE DATABASE {DATABASE}")
    new.run("mariadb", "-e", "CREATE TABLE wp_posts (id INT); CREATE VIEW seen AS SELECT * FROM wp_posts", DATABASE)
    refused(new, f"{IN} < {FILE}", "tables that are not slurmdbd's: seen, wp_posts")
    assert new.code("test", "-e", MARK)[0] == 1, "nothing was changed"
    new.run("mariadb", "-e", "DROP VIEW seen; DROP TABLE wp_posts", DATABASE)
    code, text = shell(new, KILLED_WHILE_IT_LOADS)
    assert code == 0, text
    waits_for_records(new, "a load of its records was cut")
    code, text = shell(new, f"{IN} < {FILE}")
    assert code == 0 and "as many as were written" in text, text
    new.wait_ready()
    assert {"physics", "chemistry"} <= accounts(new)
    code, text = shell(new, f"{IN} < {FILE}")
    assert code == 0 and "loaded before" in text


def back(old: Pod, new: Pod) -> None:
    """The way back takes what came since then, or is refused."""
    refused(old, f"{IN} < {FILE}", "they were written here")
    refused(old, "minivm accounting reopen < /dev/null", "not confirmed")
    new.run("mariadb", "slurm_acct_db", "-e", BIOLOGY)
    assert shell(new, f"{OUT} > {BACK}")[0] == 0
    refused(new, f"{IN} < {FILE}", "they do not contain the records that were moved out of here")
    carry(BACK, new, old)
    code, text = shell(old, f"{IN} < {BACK}")
    assert code == 0, text
    assert {"physics", "chemistry", "biology"} <= accounts(old)
    code, text = shell(old, f"{IN} < {FILE}")
    assert code == 1 and "the database is in use" in text
    assert old.service("slurmdbd")["state"] == "ready"


PASSWORD = "o#ne two"
# Debian's MariaDB, with one user who comes over the network with a password, as at a site.
EXTERNAL = f"""
mariadb-install-db --no-defaults --user=mysql --datadir=/tmp/db --skip-test-db >/dev/null 2>&1
cat > /tmp/users.sql <<END
CREATE DATABASE slurm_acct_db;
CREATE USER slurm IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON slurm_acct_db.* TO slurm;
END
exec mariadbd --no-defaults --user=mysql --datadir=/tmp/db --socket=/tmp/db/socket --init-file=/tmp/users.sql
"""
# Short clients ask the database before the load, so it waits for a list that has a client in it. The pattern is written
# with [-] because the list also has this script, which must not match.
PROCESSES_WHILE_IT_LOADS = f"""
(head -c 20000 {FILE}; sleep 600) | {IN} &
for attempt in $(seq 2400); do
    cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' ' > /tmp/processes
    grep -q loading {EXTERNAL_MARK} && grep -aq -e '[-]-host mariadb' /tmp/processes && break
    sleep 0.05
done
cat /tmp/processes
{KILL}
"""


def test_records_go_to_an_external_database_and_come_back(made: World) -> None:
    old = made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "embedded"}).wait_ready()
    until(lambda: old.service("slurmdbd")["state"] == "ready", "slurmdbd is ready", seen=old.account)
    old.run("sacctmgr", "-i", "add", "account", "physics")
    secret = made.mounts / "secrets" / "slurmdbd"
    secret.mkdir()
    (secret / "password").write_text(PASSWORD)
    command = ["bash", "-ec", EXTERNAL]
    database = made.pod("controller", "mariadb", entrypoint=command)
    query = ("mariadb", "--socket=/tmp/db/socket", "-e", "SELECT 1", DATABASE)
    until(lambda: database.code(*query)[0] == 0, "the external database answers", seen=database.logs)
    env = {
        "MINIVM_ACCOUNTING": "external",
        "MINIVM_DATABASE_HOST": "mariadb:3306",
        "MINIVM_ACCOUNTING_FROM": "embedded",
    }
    away = made.pod("accounting", "away", env=env)
    away.wait_reason("waits for the records of the embedded database")

    assert shell(old, f"{OUT} > {FILE}")[0] == 0
    carry(FILE, old, away)
    code, processes = shell(away, PROCESSES_WHILE_IT_LOADS)
    assert code == 0 and "--host mariadb" in processes and "o#ne" not in processes
    waits_for_records(away, "a load of its records was cut")
    assert shell(away, f"{IN} < {FILE}")[0] == 0
    until(lambda: away.service("slurmdbd")["state"] == "ready", "slurmdbd is ready", seen=away.account)

    assert shell(away, f"{OUT} > {BACK}")[0] == 0
    waits_for_records(away, "its records were moved out on")
    away.run("sed", "-i", 's!"mariadb:3306/!"elsewhere:3306/!', EXTERNAL_MARK)
    refused(away, "minivm accounting reopen --yes", "and the settings name mariadb:3306/slurm_acct_db")
    assert "o#ne" not in away.logs()
    carry(BACK, away, old)
    code, text = shell(old, f"{IN} < {BACK}")
    assert code == 0, text
    assert "physics" in accounts(old)
