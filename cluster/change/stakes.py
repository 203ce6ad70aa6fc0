"""Jobs and sessions that a change of a running cluster's pods would end, from its own daemons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cluster.change.plan import JobAtStake, parse_jobs
from cluster.values import RELEASE

CONTROLLER = f"{RELEASE}-controller-0"
# squeue's columns for parse_jobs(), and one more: the nodes that a waiting job names, or its client's host.
COLUMNS = "JobArrayID:|,UserName:|,Requeue:|"

Exec = Callable[[str, Iterable[str]], tuple[int, str]]


class NoAnswer(Exception):
    """slurmctld did not answer."""


def squeue(run: Exec, *arguments: str, column: str = "") -> str:
    columns = f"{COLUMNS},{column}:|" if column else COLUMNS
    code, text = run(CONTROLLER, ["timeout", "10", "squeue", "--noheader", "-O", columns, *arguments])
    if code != 0 and "Invalid node name" not in text:
        raise NoAnswer(text.strip() or f"squeue exited {code}")
    return text if code == 0 else ""


def running_on(run: Exec, node: str) -> list[JobAtStake]:
    return parse_jobs(squeue(run, "--states=RUNNING,SUSPENDED", f"--nodelist={node}"))


def waiting_for(run: Exec, node: str) -> list[JobAtStake]:
    """Return waiting jobs that name the node: Slurm never starts them without it."""
    rows = squeue(run, "--states=PENDING", column="ReqNodes").splitlines()
    named = {text: set(hostnames(run, text)) for row in rows if (text := last(row))}
    return parse_jobs("\n".join(row for row in rows if node in named.get(last(row), ())))


def begun_on(run: Exec, login: str) -> list[JobAtStake]:
    """Return jobs whose srun or salloc runs on this login pod: they end with it."""
    rows = squeue(run, "--states=RUNNING,SUSPENDED,PENDING", column="AllocNodes").splitlines()
    # slurmctld resolves the client's address to the container's name, which ends with the pod's.
    here = "\n".join(row for row in rows if last(row).endswith(login))
    batch = squeue(run, "--states=RUNNING,SUSPENDED,PENDING", column="BatchFlag").splitlines()
    without_client = {job.id for job in parse_jobs("\n".join(row for row in batch if last(row) == "1"))}
    return [JobAtStake(job.id, job.user, requeues=False) for job in parse_jobs(here) if job.id not in without_client]


def last(row: str) -> str:
    return row.rstrip("|").rpartition("|")[2].strip()


def hostnames(run: Exec, text: str) -> Sequence[str]:
    if text in ("", "(null)", "N/A"):
        return ()
    code, names = run(CONTROLLER, ["scontrol", "show", "hostnames", text])
    return names.split() if code == 0 else ()


def sessions(run: Exec, login: str) -> int:
    """Count a login pod's ssh sessions."""
    code, text = run(login, ["pgrep", "--count", "--full", r"^sshd(-session)?: [^ ]+@"])
    return int(text) if code == 0 and text.strip().isdigit() else 0
