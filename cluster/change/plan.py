"""The plan of `up`: its steps, the changed settings, and the jobs and sessions that it would end.

`LocalCluster.plan` collects the facts; here they are compared and put into words. The user sees `UpPlan.lines` and may
refuse before any pod changes. `find_stake` asks Slurm and sshd for what runs on a pod that a step ends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from cluster import ClusterError, values
from cluster.manifests import PodSpec
from cluster.pods import RunningPod
from cluster.roles import ROLES
from cluster.values import Options
from ground.errors import one_line, printable

# The user of active checks; no other job may run as it.
SLURM_USER = "slurm"
NAMED = 10  # jobs or people that a line names


class StepKind(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    REMOVE = "remove"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class PlanStep:
    kind: StepKind
    pod: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class JobAtStake:
    """A job that a step of the plan may end."""

    id: str
    user: str
    requeues: bool = True

    def __str__(self) -> str:
        return f"{self.id} of {self.user}"


@dataclass(frozen=True, slots=True)
class Stake:
    """Jobs and sessions that a pod's users lose when the pod ends."""

    # Jobs that run on the pod, or whose srun or salloc does.
    jobs: Sequence[JobAtStake] = ()
    # Pending jobs that name the pod's node.
    waiting: Sequence[JobAtStake] = ()
    sessions: int = 0
    # Why the jobs are unknown.
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class UpPlan:
    steps: tuple[PlanStep, ...] = ()
    # Changed settings of the user, and files that running pods see without a restart.
    changes: tuple[str, ...] = ()
    # Notes about images that are kept or taken.
    notes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.steps or self.changes)

    def lines(self) -> list[str]:
        lines = [f"note: {text}" for text in self.notes]
        if self.empty:
            return [*lines, "nothing to change"]
        width = max((len(step.pod) for step in self.steps), default=0)
        lines.append("plan:")
        lines += [f"  change   {text}" for text in self.changes]
        lines += [f"  {step.kind.value:<8} {step.pod:<{width}}  {step.why}".rstrip() for step in self.steps]
        lines += [f"  lost     {text}" for text in self.losses]
        return [printable(line) for line in lines]


def in_start_order(pods: Iterable[PodSpec]) -> list[PodSpec]:
    return sorted(pods, key=lambda pod: ROLES.index(pod.role))


def in_roll_order(pods: Iterable[PodSpec]) -> list[PodSpec]:
    """Roles in start order; within a role the highest number first, as a StatefulSet rolls."""
    return in_start_order(reversed(list(pods)))


def list_changed_settings(before: Options, after: Options) -> list[str]:
    """List the user's changed settings. Values may be secrets, so only their names are shown."""
    changes = []
    for item in fields(Options):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if item.name == "auth":
            old, new = values.auth(before), values.auth(after)  # the overrides may say it
        if old == new or item.name in ("values_file", "own_cgroups"):
            continue
        if item.name == "people":
            changes.append(f"people: {', '.join(list_changed_people(old, new))}")
        elif item.name == "overrides":
            changes.append(f"values: {', '.join(list_differing(old, new))}")
        elif isinstance(old, Mapping):
            changes += [f"{item.name}: {key}={new.get(key) or 'default'}" for key in list_differing(old, new)]
        else:
            changes.append(f"{item.name}: {old or 'default'} -> {new or 'default'}")
    return changes


def list_changed_people(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List added, removed and changed people of a people.yaml, and whether its groups changed."""
    before, after = ({person["name"]: person for person in people.get("users", [])} for people in (old, new))
    changes = [f"new {name}" for name in after if name not in before]
    changes += [f"no {name}" for name in before if name not in after]
    changes += [f"changed {name}" for name in after if name in before and after[name] != before[name]]
    changes += ["groups"] * (old.get("groups", []) != new.get("groups", []))
    return changes[:NAMED] + [f"and {len(changes) - NAMED} more"] * (len(changes) > NAMED)


def list_lost_people(before: Options | None, after: Options) -> list[str]:
    """List the people whom a new people.yaml removes."""
    old, new = before.people if before else {}, after.people
    present = {person["name"] for person in new.get("users", [])}
    names = [person["name"] for person in old.get("users", []) if person["name"] not in present]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    policy = (after.overrides.get("people") or {}).get("removedJobs", "keep")
    jobs = {"cancel-pending": ", pending jobs", "cancel": ", jobs"}.get(policy, "")
    return [f"people: keys, login sessions{jobs} of {', '.join(names[:NAMED])}{more}"] if names else []


def note_auth(auth: str) -> list[str]:
    """Return the note for a cluster with munge: auth/slurm exists, and `--auth slurm` enables it."""
    if auth != "munge":
        return []
    return ["Slurm's daemons keep munge; new clusters have auth/slurm, and `--auth slurm` takes it while no job runs"
            " (docs/how-to/change-authentication.md)"]  # fmt: skip


def note_records(origin: str) -> list[str]:
    """Return the note for a change that moves the records of accounting."""
    text = f"the records of accounting move from the {origin} database; until then jobs go on, sacct and sacctmgr fail"
    return [text] if origin else []


def list_differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the leaves that differ."""
    names: list[str] = []
    for key in sorted({*old, *new}, key=str):
        before, after = old.get(key), new.get(key)
        if isinstance(before or {}, Mapping) and isinstance(after or {}, Mapping) and (before or after):
            names += list_differing(before or {}, after or {}, f"{prefix}{key}.")
        elif before != after:
            names.append(f"{prefix}{key}")
    return names


# Parts of a pod's description that their names do not explain.
PARTS = {"searches": "DNS search domains", "mounts": "volumes", "fields": "environment from the pod"}


def reasons(before: Mapping[str, Any], after: Mapping[str, Any], slurm_in: Callable[[str], str]) -> str:
    """Return why a pod is replaced. Images are ids here. Do not show environment values, which may be secrets."""
    if not before:
        return "its description changed"
    changes = []
    for key in (key for key in after if before.get(key) != after[key]):
        if key == "image":
            old, new = (slurm_in(str(side["image"])) for side in (before, after))
            changes.append(f"Slurm {old} -> {new}" if old != new and new else "new image")
        elif isinstance(after[key], Mapping) and isinstance(before.get(key), Mapping):
            changes.append(f"{key} ({', '.join(list_differing(before[key], after[key]))})")
        else:
            changes.append(PARTS.get(key, key.replace("_", " ")))
    return ", ".join(changes) or "its description changed"


def list_partitions(files: Mapping[str, bytes]) -> set[str]:
    """Return the partitions that a slurm.conf and its included files define."""
    pattern = re.compile(rb"^\s*PartitionName\s*=\s*([^\s#]+)", re.IGNORECASE | re.MULTILINE)
    names = {name.decode(errors="replace") for text in files.values() for name in pattern.findall(text)}
    return names - {"DEFAULT"}


def losses(
    steps: Sequence[PlanStep],
    *,
    partitions: Iterable[str],
    stakes: Mapping[str, Stake],
    refused: Iterable[str] = (),
    clients: Sequence[JobAtStake] = (),
) -> list[str]:
    """Return what the plan costs its users.

    `refused`: jobs that a changed slurm.conf would end. `clients`: waiting jobs that would hang on upgraded workers.
    """
    losses_found = [f"partition {name} goes" for name in sorted(partitions)]
    for step in steps:
        stake = stakes.get(step.pod, Stake())
        if step.kind is StepKind.CREATE:
            continue
        if step.kind is StepKind.REMOVE:
            losses_found.append(f"pod {step.pod} goes")
            if stake.waiting:
                losses_found.append(f"{step.pod}: jobs that name it wait for ever: {join_jobs(stake.waiting)}")
        requeued = [job for job in stake.jobs if job.requeues]
        ended = [job for job in stake.jobs if not job.requeues]
        if requeued:
            losses_found.append(f"{step.pod}: jobs that outlast its drain are requeued: {join_jobs(requeued)}")
        if ended:
            losses_found.append(f"{step.pod}: jobs that outlast its drain end: {join_jobs(ended)}")
        if count := stake.sessions:
            losses_found.append(f"{step.pod}: {count} ssh session{'s' * (count > 1)} end{'s' * (count == 1)}")
        if stake.unknown:
            losses_found.append(f"{step.pod}: whatever runs there, slurmctld did not answer: {stake.unknown}")
    if clients:
        losses_found.append(f"waiting srun and salloc, which could hang on the new workers, end: {join_jobs(clients)}")
    return losses_found + [f"slurm.conf: {text}; the controller refuses it until they have ended" for text in refused]


def not_ready(reasons: Sequence[tuple[str, str]]) -> str:
    """Format why pods are not ready, in start order: each pod waits for those before it, so the first is the cause."""
    first, *rest = [f"\n  {pod}: {reason}" for pod, reason in reasons] or [""]
    return first + ("\nand, perhaps for that reason:" + "".join(rest) if rest else "")


def join_jobs(jobs: Sequence[JobAtStake]) -> str:
    text = ", ".join(str(job) for job in jobs[:NAMED])
    return text + (f" and {len(jobs) - NAMED} more" if len(jobs) > NAMED else "")


def parse_jobs(text: str) -> list[JobAtStake]:
    """Parse `squeue -O 'JobArrayID:|,UserName:|,Requeue:|'`, one job a line."""
    rows = [line.split("|") for line in text.splitlines()]
    return [
        JobAtStake(row[0].strip(), row[1].strip(), row[2].strip() != "0")
        for row in rows
        if len(row) >= 3 and row[0].strip()
    ]


# Jobs and sessions that a change of a running cluster's pods would end, as Slurm and sshd report them.

# squeue's columns for parse_jobs(), and one more: the nodes that a waiting job names, or its client's host.
COLUMNS = "JobArrayID:|,UserName:|,Requeue:|"

Exec = Callable[[str, Iterable[str]], tuple[int, str]]
# The same in the pod of the active controller.
RunSlurm = Callable[[Iterable[str]], tuple[int, str]]


class NoAnswer(Exception):
    """slurmctld did not answer."""


def find_stake(step: PlanStep, current: RunningPod | None, *, run_slurm: RunSlurm, run: Exec) -> Stake:
    """Find the jobs and sessions of the pod that a step ends."""
    if current is None or not current.running:
        return Stake()
    try:
        if current.role == "worker":
            waiting = list_waiting_for(run_slurm, step.pod) if step.kind is StepKind.REMOVE else []
            return Stake(jobs=list_running_on(run_slurm, step.pod), waiting=waiting)
        if current.role == "login":
            count = sessions(run, step.pod)
            return Stake(jobs=list_begun_on(run_slurm, step.pod), sessions=count)
    except (ClusterError, NoAnswer, OSError) as error:
        return Stake(unknown=one_line(str(error)))
    return Stake()


MOST_THREADS = 8


def find_stakes(
    steps: Sequence[PlanStep], running: Mapping[str, RunningPod], *, run_slurm: RunSlurm, run: Exec
) -> dict[str, Stake]:
    """Find what each step ends, by pod; the pods answer side by side."""
    find = partial(find_stake, run_slurm=run_slurm, run=run)
    with ThreadPoolExecutor(MOST_THREADS) as pool:
        stakes = pool.map(find, steps, [running.get(step.pod) for step in steps])
        return {step.pod: stake for step, stake in zip(steps, stakes, strict=True)}


def squeue(run: RunSlurm, *arguments: str, column: str = "") -> str:
    columns = f"{COLUMNS},{column}:|" if column else COLUMNS
    code, text = run(["timeout", "10", "squeue", "--noheader", "-O", columns, *arguments])
    if code != 0 and "Invalid node name" not in text:
        raise NoAnswer(text.strip() or f"squeue exited {code}")
    return text if code == 0 else ""


def list_running_on(run: RunSlurm, node: str) -> list[JobAtStake]:
    jobs = parse_jobs(squeue(run, "--states=RUNNING,SUSPENDED", f"--nodelist={node}"))
    return [job for job in jobs if job.user != SLURM_USER]  # active checks, which any other job preempts


def list_waiting_for(run: RunSlurm, node: str) -> list[JobAtStake]:
    """Return waiting jobs that name the node: Slurm never starts them without it."""
    rows = squeue(run, "--states=PENDING", column="ReqNodes").splitlines()
    named = {text: set(hostnames(run, text)) for row in rows if (text := last(row))}
    return parse_jobs("\n".join(row for row in rows if node in named.get(last(row), ())))


def list_begun_on(run: RunSlurm, login: str) -> list[JobAtStake]:
    """Return jobs whose srun or salloc runs on this login pod: they end with it."""
    rows = squeue(run, "--states=RUNNING,SUSPENDED,PENDING", column="AllocNodes").splitlines()
    # slurmctld resolves the client's address to the container's name, which ends with the pod's.
    started_here = "\n".join(row for row in rows if last(row).endswith(login))
    batch = squeue(run, "--states=RUNNING,SUSPENDED,PENDING", column="BatchFlag").splitlines()
    without_client = {job.id for job in parse_jobs("\n".join(row for row in batch if last(row) not in ("", "0")))}
    return [
        JobAtStake(job.id, job.user, requeues=False) for job in parse_jobs(started_here) if job.id not in without_client
    ]


def list_waiting_clients(run: RunSlurm) -> list[JobAtStake]:
    """Return waiting jobs of srun and salloc.

    An srun asks for the MPI plug-in that its cluster had when it was started. On a worker whose Slurm lacks that, its
    step neither starts nor ends, and neither scancel nor its client's end frees the CPUs.
    """
    return parse_jobs(
        "\n".join(row for row in squeue(run, "--states=PENDING", column="BatchFlag").splitlines() if last(row) == "0")
    )


def end_clients(run: RunSlurm, log: Callable[[str], None]) -> None:
    """Cancel waiting jobs of srun and salloc before the workers get another Slurm: each client says so and ends."""
    try:
        jobs = list_waiting_clients(run)
    except (ClusterError, NoAnswer, OSError) as error:
        problem = one_line(str(error))
        log(f"waiting srun and salloc are unknown ({problem}): a step that hangs on a new worker ends by"
            " `minivm restart slurmd` there")  # fmt: skip
        return
    if jobs:
        note = "AdminComment=minivm: its srun or salloc waited while the cluster got another Slurm; submit it again"
        for job in jobs:
            run(["scontrol", "update", f"JobId={job.id}", note])
        # One that has started since then runs on an old worker.
        code, text = run(["scancel", "--quiet", "--state=PENDING", *(job.id for job in jobs)])
        log(f"waiting srun and salloc {'end' if code == 0 else f'do not end ({one_line(text)})'}: {join_jobs(jobs)}")


def last(row: str) -> str:
    return row.rstrip("|").rpartition("|")[2].strip()


def hostnames(run: RunSlurm, text: str) -> Sequence[str]:
    if text in ("", "(null)", "N/A"):
        return ()
    code, names = run(["scontrol", "show", "hostnames", text])
    return names.split() if code == 0 else ()


def sessions(run: Exec, login: str) -> int:
    """Count a login pod's ssh sessions."""
    code, text = run(login, ["pgrep", "--count", "--full", r"^sshd(-session)?: [^ ]+@"])
    return int(text) if code == 0 and text.strip().isdigit() else 0
