"""A worker gives black boxes by credentials of munge or of Slurm: to the job's user and root, and to nobody else."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator

import pytest
import testinfra  # type: ignore[import-untyped]  # ships no types
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import docker, image_of
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

PYTHON = "/opt/minivm/bin/python3"
JOB = "SLURM_JOB_ID={job} SLURM_JOB_UID=20001 SLURM_JOB_GID=20001"
# Asks twice with the same credential. With auth/slurm the node's word is a part of the question.
ASK = """
import os, socket, sys
from health import black_box, credentials
by, asked = credentials.way(), ""
credential = b""
for _ in range(1 if sys.argv[2:] else 2):
    with socket.create_connection(("127.0.0.1", black_box.PORT), 10) as connection:
        connection.settimeout(60)
        word = connection.recv(100).decode().strip() if by == "slurm" else ""
        asked = asked or f"{sys.argv[1]} {word}".strip(" ")
        credential = credential or (asked.encode() if sys.argv[2:] else credentials.seal(asked.encode(), 0, by))
        connection.sendall(credential)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    print(*credentials.unseal(answer, by) if answer else ("no answer",))
"""
FLOOD = """
import socket, sys
from health import black_box
kept = [socket.socket() for _ in range(300)]
for each in kept:
    each.setblocking(False)
    each.connect_ex(("127.0.0.1", black_box.PORT))
print("flooded", flush=True)
sys.stdin.read()
"""


MUNGE = """
install -d -m 0755 -o munge -g munge /run/munge /var/log/munge
su -s /bin/sh munge -c 'mungekey --create --keyfile=/etc/munge/munge.key && munged'
"""
# A sackd of a login pod signs as the slurmd of a worker does.
SLURM = """
head -c 128 /dev/urandom > /etc/slurm/slurm.key && chown slurm /etc/slurm/slurm.key && chmod 400 /etc/slurm/slurm.key
printf 'ClusterName=x\nSlurmctldHost=x\nSlurmUser=slurm\nAuthType=auth/slurm\nCredType=cred/slurm\n' > /run/sackd.conf
SLURM_SACK_KEY=/etc/slurm/slurm.key setsid sackd -D -f /run/sackd.conf > /dev/null 2>&1 < /dev/null &
"""


@pytest.fixture(scope="module", params=["munge", "slurm"])
def worker(request: pytest.FixtureRequest) -> Iterator[Host]:
    by = str(request.param)
    container = docker(
        "run", "--detach", "--init", "--network", "none", "--env", f"MINIVM_AUTH={by}", "--entrypoint", "/bin/sleep",
        image_of("worker"), "infinity",
    )  # fmt: skip
    try:
        host = testinfra.get_host(f"docker://{container}")
        host.check_output(MUNGE if by == "munge" else SLURM)
        host.check_output("useradd --uid 20001 nina && useradd --uid 20002 olga")
        socket = "/run/munge/munge.socket.2" if by == "munge" else "/run/slurm/sack.socket"
        until(lambda: host.run(f"test -S {socket}").rc == 0, "credentials are made")
        docker("exec", "--detach", "--env", "MINIVM_POD_NAME=w0", container, PYTHON, "-I", "-m", "health.runner")
        until(lambda: host.run("test -S /run/minivm/runner/socket").rc == 0, "the runner listens")
        yield host
    finally:
        docker("rm", "--force", container)


def asking(user: str, question: str, *plain: str) -> str:
    words = shlex.join([PYTHON, "-I", "-c", ASK, question, *plain])
    return f"su -s /bin/sh {user} -c {shlex.quote(words)}"


def ask(worker: Host, user: str, question: str, *plain: str) -> list[str]:
    lines: list[str] = worker.check_output(asking(user, question, *plain)).splitlines()
    return lines


def test_a_box_goes_to_its_user_and_root_only(worker: Host) -> None:
    for kind in ("prolog", "epilog"):
        worker.check_output(f"{JOB.format(job=12)} /usr/libexec/minivm/{kind}")
    place = "/var/log/minivm/boxes"
    assert worker.check_output(f"stat -c '%a %U %n' {place} {place}/*").splitlines() == [
        f"700 root {place}",
        f"600 root {place}/12.20001.jsonl",
    ]
    question = "minivm-box 1 12 w0"
    for user in ("nina", "root"):
        first, again = ask(worker, user, question)
        assert first.startswith("0 b'minivm-box 1 12 w0") and '"begin"' in first and '"end"' in first
        assert again == "no answer", "a credential is good once"
    first = re.sub(" [0-9a-f]{32}", "", ask(worker, "olga", question)[0])
    only_the_clock = r"""0 b'minivm-box 1 12 w0\\n\{"kind":"now","at":[0-9.]+,"boot":[0-9.]+\}\\n'"""
    assert re.fullmatch(only_the_clock, first), "not even that it exists"


@pytest.mark.parametrize("question", ["minivm-box 1 12 w1", "minivm-box 1 ../12 w0", "minivm-box 1 12 w0\n", "x"])
def test_what_is_no_question_to_this_node_gets_no_answer(worker: Host, question: str) -> None:
    assert ask(worker, "nina", question) == ["no answer"] * 2
    assert ask(worker, "nina", question, "without a credential") == ["no answer"]


def test_silent_askers_keep_no_job_from_its_scripts(worker: Host) -> None:
    container = worker.backend.name
    flood = shlex.join([PYTHON, "-I", "-c", FLOOD])
    worker.check_output("mkfifo /tmp/held && chmod 644 /tmp/held; (sleep infinity > /tmp/held & echo $! > /tmp/holds)")
    docker("exec", "--detach", container, "su", "-s", "/bin/sh", "olga", "-c", f"{flood} < /tmp/held > /tmp/flooded")
    until(lambda: worker.run("grep -q flooded /tmp/flooded").rc == 0, "the port is flooded")
    numbers = itertools.count(20)

    def is_taken() -> bool:
        worker.check_output(f"{JOB.format(job=next(numbers))} /usr/libexec/minivm/prolog")
        return bool(worker.run("test -e /run/minivm/runner/missed").rc)

    # On a busy machine one may be missed without a flood, too.
    until(lambda: all(is_taken() for _ in range(5)), "the resident runner takes five one after the other")
    runs = map(json.loads, worker.check_output("tail -n 5 /var/log/minivm/runs.jsonl").splitlines())
    last = next(numbers)
    assert [int(run["job"]) for run in runs] == list(range(last - 5, last))
    worker.check_output("kill $(cat /tmp/holds)")

    def is_answered() -> bool:
        tried = worker.run(asking("nina", "minivm-box 1 20 w0"))
        return tried.rc == 0 and '"begin"' in tried.stdout

    until(is_answered, "askers are answered again")


TAKE = """
import socket, sys
from health import black_box
with socket.create_server(("", black_box.PORT)):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_a_port_that_was_in_use_is_taken_later(worker: Host) -> None:
    """As of a fork of the runner before, which may hold it for a while."""
    container = worker.backend.name
    worker.check_output("kill $(pgrep -of '[h]ealth.runner')")
    until(lambda: worker.run("pgrep -f '[h]ealth.runner'").rc != 0, "the runner has ended")
    take = shlex.join([PYTHON, "-I", "-c", TAKE])
    worker.check_output("mkfifo /tmp/keeps; (sleep infinity > /tmp/keeps & echo $! > /tmp/keeper)")
    docker("exec", "--detach", container, "sh", "-c", f"{take} < /tmp/keeps > /tmp/taken; echo freed >> /tmp/taken")
    until(lambda: worker.run("grep -q taken /tmp/taken").rc == 0, "the port is in use")
    start = f"MINIVM_POD_NAME=w0 exec {PYTHON} -I -m health.runner 2> /tmp/said"
    docker("exec", "--detach", container, "sh", "-c", start)
    until(lambda: worker.run("grep -q 'cannot listen on port 8652' /tmp/said").rc == 0, "the runner says so")
    worker.check_output("kill $(cat /tmp/keeper)")
    until(lambda: worker.run("grep -q freed /tmp/taken").rc == 0, "the port is free")

    def answers() -> bool:
        return bool(worker.run("grep -qi ':21CC .* 0A ' /proc/net/tcp /proc/net/tcp6").rc == 0)

    until(answers, "the runner listens")
    assert ask(worker, "nina", "minivm-box 1 12 w0")[0].startswith("0 b'minivm-box 1 12 w0")
