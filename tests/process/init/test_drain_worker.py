"""A leaving worker while slurmctld is away: its jobs get their time, and no user's process counts as a job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground import commands
from init.drain import worker as drain_worker
from init.drain.deadline import Deadline
from init.errors import InitError
from init.slurm import client
from tests.process.living import alive
from tests.support import slurm_programs
from tests.waiting import until

pytestmark = pytest.mark.root

NOBODY = 65534


@contextlib.contextmanager
def step(directory: Path, uid: int) -> Iterator[int]:
    """Start a process called slurmstepd."""
    program = directory / "slurmstepd"
    program.write_text("#!/bin/sh\necho there\nread -r _\n")
    program.chmod(0o755)
    for above in [directory, *directory.parents][:-2]:
        above.chmod(above.stat().st_mode | 0o011)
    started = subprocess.Popen(
        [program], user=uid, group=uid, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert started.stdout is not None and started.stdout.readline() == b"there\n"
        yield started.pid
    finally:
        started.kill()
        started.communicate()


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """squeue, to which slurmctld does not answer the first three times."""
    asked, program = tmp_path / "asked", tmp_path / "squeue"
    program.write_text(
        f"#!/bin/sh\necho x >> {asked}\n[ $(wc -l < {asked}) -gt 3 ] && exit 0\n"
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(client, "SQUEUE", str(program))
    return asked


def test_a_slurmctld_that_is_away_is_asked_again_while_jobs_run(
    tmp_path: Path, away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with step(tmp_path, 0) as pid:
        assert pid in drain_worker.steps()
        assert drain_worker.wait_for_jobs("w1", "ctl:6817", Deadline(60.0)) == {}
    assert away.read_text().count("x") == 4
    assert capsys.readouterr().out == "jobs run here, so the drain asks slurmctld again: ctl:6817 cannot be reached\n"


def test_a_controller_whose_name_stays_gone_is_not_waited_for(
    tmp_path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Service went with the release. A name without an address, or a name server that is away, are no such word."""
    answers = [socket.EAI_NODATA, socket.EAI_AGAIN, *[socket.EAI_NONAME] * 100]

    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(answers.pop(0), "as the resolver says")

    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(drain_worker, "GONE", 2.0)
    deadline = Deadline(60.0)
    with step(tmp_path, 0), pytest.raises(client.SlurmError, match="the cluster was deleted"):
        drain_worker.wait_for_jobs("w1", "ctl:6817", deadline)
    assert deadline.left > 30.0 and len(answers) < 100, "an absent name is asked for again before it counts"


def test_a_slurmctld_that_is_away_at_the_end_is_told_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not told, it keeps the node for there, and what could not be let go for running, until SlurmdTimeout."""
    scontrol, squeue, told = tmp_path / "scontrol", tmp_path / "squeue", tmp_path / "told"
    scontrol.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        "if [ -s away ]; then sed -i 1d away; echo 'Unable to contact slurm controller' >&2; exit 1; fi\n"
        f'case "$*" in *show*) echo \'NodeName=w1 State=IDLE\';; *) echo "$*" >> {told};; esac\n'
    )
    squeue.write_text(f"#!/bin/sh\nprintf 'x\\nx\\nx\\n' > {tmp_path}/away\n")
    for program in (scontrol, squeue):
        program.chmod(0o755)
        monkeypatch.setattr(client, program.name.upper(), str(program))
    monkeypatch.setattr(drain_worker, "name_of_node", lambda: "w1")
    drain_worker.drain("ctl:6817", Deadline(60.0))
    assert told.read_text().splitlines()[-1] == "update nodename=w1 state=down reason=minivm: pod stops"
    assert capsys.readouterr().out.endswith("w1 is down in Slurm until the pod is back\n")
    squeue.write_text(f"#!/bin/sh\nyes | head -100 > {tmp_path}/away\n")
    with pytest.raises(client.SlurmError, match="cannot be reached"):
        drain_worker.drain("ctl:6817", Deadline(60.0))


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        (
            "State=IDLE+DRAIN Reason=fan 3 [ann@2026-11-20T10:32:18]",
            "give w1 jobs again: the pod takes work again, but w1 stays drained in Slurm, by ann@2026-11-20T10:32:18: "
            "fan 3 (run `scontrol update nodename=w1 state=resume` to lift it)",
        ),
        ("State=DOWN Reason=broken", "w1 stays down in Slurm: broken"),
        ("State=IDLE+DRAIN", "w1 stays drained in Slurm: no reason given"),
        ("State=IDLE", ""),
        ("State=IDLE+DRAIN Reason=minivm: pod stops [root@2026-11-20T10:32:18]", ""),
    ],
)
def test_a_resume_fails_where_anything_else_holds_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, error: str
) -> None:
    """Told that the pod takes work again, an operator would wait for jobs that never come."""
    scontrol, told = tmp_path / "scontrol", tmp_path / "told"
    scontrol.write_text(
        f'#!/bin/sh\ncase "$*" in *show*) echo \'NodeName=w1 {shown}\';; *) echo "$*" >> {told};; esac\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setattr(client, "SCONTROL", str(scontrol))
    monkeypatch.setattr(drain_worker, "name_of_node", lambda: "w1")
    with pytest.raises(InitError, match=re.escape(error)) if error else contextlib.nullcontext():
        drain_worker.resume("ctl:6817")
    assert told.exists() == ("pod stops" in shown)


def test_many_small_jobs_are_let_go_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of hundreds of them has five seconds. Here a client of Slurm ends only once it is not the only one."""
    scontrol, scancel = tmp_path / "scontrol", tmp_path / "scancel"
    scontrol.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked-$3\n[ $3 = 3 ] && {{ echo '{client.NEVER[0]} for job 3' >&2; exit 1; }}\n"
        f"for _ in 1 2 3 4 5 6 7 8 9; do [ $(ls {tmp_path} | grep -c asked-) -gt 1 ] && exit 0; sleep 1; done\nexit 1\n"
    )
    scancel.write_text("#!/bin/sh\nexit 0\n")
    for program in (scontrol, scancel):
        program.chmod(0o755)
        monkeypatch.setattr(client, program.name.upper(), str(program))
    told: list[str] = []
    client.free({str(job): "R" for job in range(1, 5)}, "ctl:6817", told.append)
    assert told == [
        "requeued job 1", "requeued job 2", f"job 3 is not requeued: {client.NEVER[0]}", "cancelled job 3",
        "requeued job 4",
    ]  # fmt: skip


def test_of_hundreds_of_jobs_a_few_clients_speak_and_each_job_has_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain cancels only a job that it may not requeue.

    A job that has gone meanwhile may be pending, and a missing answer may have been a yes.
    """
    said = {
        "7": f"{client.NEVER[0]} for job 7", "8": f"{client.NEVER[1]} for job 8", "4_1": f"4_1: {client.NEVER[0]}",
        "9": "Invalid job id specified for job 9", "10": "Unable to contact slurm controller for job 10",
    }  # fmt: skip
    scontrol, scancel, told = tmp_path / "scontrol", tmp_path / "scancel", tmp_path / "told"
    cases = "".join(f"*,{job},*) echo '{text}' >&2; rc=1;; esac\ncase ,$3, in " for job, text in said.items())
    scontrol.write_text(f'#!/bin/sh\necho "$1 $2" >> {told}\nrc=0\ncase ,$3, in {cases}*) exit $rc;; esac\n')
    scancel.write_text(f'#!/bin/sh\necho "cancel $*" >> {told}\n')
    for program in (scontrol, scancel):
        program.chmod(0o755)
        monkeypatch.setattr(client, program.name.upper(), str(program))
    jobs = [*said, *(str(job) for job in range(100, 500))]
    heard: list[str] = []
    client.free(dict.fromkeys(jobs, "R") | {"600": "CG"}, "ctl:6817", heard.append)
    lines = told.read_text().splitlines()
    assert lines.count("requeue incomplete") == client.AT_ONCE
    assert {word for line in lines if line.startswith("cancel ") for word in line.split()[1:]} == {"7", "8", "4_1"}
    assert {line for line in heard if not line.startswith("requeued job ")} == {
        f"job 7 is not requeued: {client.NEVER[0]}", f"job 8 is not requeued: {client.NEVER[1]}",
        f"job 4_1 is not requeued: {client.NEVER[0]}", "job 9 is not requeued: Invalid job id specified",
        "job 10 is not requeued: ctl:6817 cannot be reached",
        "cancelled job 7", "cancelled job 8", "cancelled job 4_1",
    }  # fmt: skip
    assert len(heard) == len(jobs) + 3


def test_a_job_is_named_so_that_no_other_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain names array members and heterogeneous jobs exactly.

    The last member of an array has the whole array's number. Slurm takes only the first part of a heterogeneous job;
    where that is elsewhere, its part on this node runs as long.
    """
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\ncase $7 in\n%i*) printf '12_1 R\\n5+1 R\\n5+0 CG\\n20+0 R\\n20+1 CG\\n9 CF\\n';;\n"
        "*) printf '12 R\\n';;\nesac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setattr(client, "SQUEUE", str(squeue))
    assert client.jobs("w1", "ctl:6817") == {"9": "CF", "5": "R", "20": "R", "12_1": "R"}


def install_programs(directory: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> Path:
    """Stand in for squeue by this script, and for scontrol of an idle node; return the file of scontrol's changes."""
    told = directory / "told"
    scontrol = f'#!/bin/sh\ncase "$*" in *show*) echo \'NodeName=w1 State=IDLE\';; *) echo "$*" >> {told};; esac\n'
    slurm_programs.install(directory, monkeypatch, scontrol=scontrol, squeue=squeue)
    monkeypatch.setattr(drain_worker, "name_of_node", lambda: "w1")
    return told


def test_a_slurmctld_that_goes_while_the_last_jobs_end_is_told_that_the_node_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = install_programs(
        tmp_path,
        monkeypatch,
        f"#!/bin/sh\nmkdir {tmp_path}/looked && {{ echo '7 R'; exit; }}\n"
        "echo 'Unable to contact slurm controller' >&2\nexit 1\n",
    )
    drain_worker.drain("ctl:6817", Deadline(drain_worker.RESERVE))
    assert told.read_text().splitlines() == [
        "update nodename=w1 state=drain reason=minivm: pod stops", "requeue incomplete 7",
        "update nodename=w1 state=down reason=minivm: pod stops",
    ]  # fmt: skip


def test_the_reason_comes_before_the_requeue_and_spares_what_a_site_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = install_programs(
        tmp_path,
        monkeypatch,
        f'#!/bin/sh\ncase "$*" in *admin_comment*) cat {tmp_path}/comments; exit;; esac\n'
        f"mkdir {tmp_path}/looked && printf '7 R\\n8 CG\\n9 R\\n5+0 R\\n4_2 R\\n'; exit 0\n",
    )
    (tmp_path / "comments").write_text("7|(null)|\n9|billed to Ann|\n5+0||\n4_2|minivm: an earlier run|\n")
    monkeypatch.setattr(client, "AT_ONCE", 1)
    # On a busy machine a client takes a second of these.
    monkeypatch.setattr(drain_worker, "RESERVE", 40.0)
    drain_worker.drain("ctl:6817", Deadline(40.0))
    reason = "minivm: the pod of node w1 stops: the job is requeued, or cancelled where it cannot be requeued"
    assert told.read_text().splitlines() == [
        "update nodename=w1 state=drain reason=minivm: pod stops", f"update jobid=7,4_2,5 admincomment={reason}",
        *(f"notify {job} {reason}" for job in ("7", "9", "4_2", "5")),
        "requeue incomplete 7,9,4_2,5", "update nodename=w1 state=down reason=minivm: pod stops",
    ]  # fmt: skip


def test_a_drain_of_a_person_that_comes_while_slurmctld_is_asked_again_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pod's reason the next pod would lift it, and jobs would start on a machine under repair."""
    told = install_programs(tmp_path, monkeypatch, "#!/bin/sh\nexit 0\n")
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\ncd {tmp_path}\n[ ! -e drained ] || by='+DRAIN Reason=fan is loud [ann@2026-11-20T10:32:18]'\n"
        'case "$*" in *show*) echo "NodeName=w1 State=IDLE$by";;\n'
        "*) [ -e drained ] || { touch drained; echo 'Unable to contact slurm controller' >&2; exit 1; }\n"
        f'echo "$*" >> {told};; esac\n'
    )
    with step(tmp_path, 0):
        drain_worker.drain("ctl:6817", Deadline(60.0))
    assert (tmp_path / "drained").exists() and not told.exists()


DRAIN = """
import sys
from init.drain import __main__ as program, worker
from init.slurm import client
client.SCONTROL, worker.name_of_node = sys.argv[1], lambda: "w1"
raise SystemExit(program.main(["worker"]))
"""


def test_a_drain_that_is_taken_back_leaves_no_request_behind(tmp_path: Path) -> None:
    """PID 1 ends it and resumes the node. A client that still waits for slurmctld would drain the node after that."""
    scontrol, begun = tmp_path / "scontrol", tmp_path / "begun"
    scontrol.write_text(
        f"#!/bin/sh\ncase \"$*\" in *show*) echo 'NodeName=w1 State=IDLE';;\n"
        f"*) echo $$ > {begun}.new && mv {begun}.new {begun}; exec sleep 600;; esac\n"
    )
    scontrol.chmod(0o755)
    drain = subprocess.Popen(
        [sys.executable, "-c", DRAIN, str(scontrol)],
        env={**os.environ, "MINIVM_GRACE_SECONDS": "600", "MINIVM_POD_NAME": "w1"}, start_new_session=True,
    )  # fmt: skip
    request = 0
    try:
        until(lambda: begun.exists() or drain.poll() is not None, "it asks slurmctld to drain the node")
        request = int(begun.read_text())
        assert alive(request)
        drain.terminate()
        assert drain.wait(60) != 0
        until(lambda: not alive(request), "the request ends with it")
    finally:
        drain.kill()
        drain.wait()
        if request and alive(request):
            os.kill(request, signal.SIGKILL)


@pytest.mark.parametrize("left", [60.0, drain_worker.RESERVE])
def test_it_is_not_waited_for_without_a_job_or_without_time(tmp_path: Path, away: Path, left: float) -> None:
    with step(tmp_path, NOBODY if left > drain_worker.RESERVE else 0) as pid:
        assert (pid in drain_worker.steps()) is (left == drain_worker.RESERVE)
        if left > drain_worker.RESERVE and drain_worker.steps():
            pytest.skip("this machine runs jobs of its own")
        with pytest.raises(client.SlurmError):
            drain_worker.wait_for_jobs("w1", "ctl:6817", Deadline(left))
    assert away.stat().st_size == 2


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Which client of Slurm is asked, how long it may take, and when that is."""
    found: list[tuple[str, float, float]] = []

    def ran(argv: list[str], *, within: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        found.append((Path(argv[0]).name, within, time.monotonic()))
        return commands.ran(argv, within=within, env=env)

    monkeypatch.setattr(client, "ran", ran)
    return found


def test_what_slurmctld_has_said_counts_though_the_rest_does_not_come_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[tuple[str, float, float]]
) -> None:
    """Otherwise a job that can only be cancelled would stay running for slurmctld on a node that is gone.

    Both share one deadline.
    """
    scontrol, scancel, told = tmp_path / "scontrol", tmp_path / "scancel", tmp_path / "told"
    scontrol.write_text(
        f"#!/bin/sh\necho '{client.NEVER[0]} for job 7' >&2\nprintf '{client.NEVER[1]} for job 8' >&2\nexec sleep 600\n"
    )
    scancel.write_text(f'#!/bin/sh\necho "$*" >> {told}\n')
    for program in (scontrol, scancel):
        program.chmod(0o755)
        monkeypatch.setattr(client, program.name.upper(), str(program))
    monkeypatch.setattr(client, "AT_ONCE", 1)
    heard: list[str] = []
    client.free(dict.fromkeys(["7", "8", "9"], "R"), "ctl:6817", heard.append, within=6.0)
    assert told.read_text() == "7\n"
    silence = "no answer from ctl:6817 in time"
    assert [re.sub(r"within [\d.]+ s", "in time", text) for text in heard] == [
        f"job 7 is not requeued: {client.NEVER[0]}", f"job 8 is not requeued: {silence}",
        f"job 9 is not requeued: {silence}", "cancelled job 7",
    ]  # fmt: skip
    assert [name for name, *_ in allowed] == ["scontrol", "scancel"]
    assert sum(within for _, within, _ in allowed) <= 6.0


def test_a_drain_asks_nothing_for_longer_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[tuple[str, float, float]]
) -> None:
    """After squeue's first answer slurmctld answers no more.

    PID 1 ends a drain at its deadline, and the last message to slurmctld comes last.
    """
    scontrol, squeue = tmp_path / "scontrol", tmp_path / "squeue"
    scontrol.write_text("#!/bin/sh\ncase \"$*\" in *show*) echo 'NodeName=w1 State=IDLE';; esac\n")
    squeue.write_text(f"#!/bin/sh\nmkdir {tmp_path}/looked && {{ echo '7 R'; exit; }}\nexec sleep 600\n")
    for program in (scontrol, squeue):
        program.chmod(0o755)
        monkeypatch.setattr(client, program.name.upper(), str(program))
    monkeypatch.setattr(drain_worker, "name_of_node", lambda: "w1")
    deadline = Deadline(drain_worker.RESERVE)
    drain_worker.drain("ctl:6817", deadline)
    # The jobs, their comments, and the jobs again.
    assert [name for name, *_ in allowed].count("squeue") == 3
    # Whatever is left, a question has the second without which it need not be asked.
    assert not [name for name, within, at in allowed if within > max(1.0, deadline.end - at)]
