"""Explain why a job waits, from Slurm's reason and the nodes, limits and jobs that it depends on. Pure.

`explain` finds the answer by Slurm's reason: by a function that looks at more (`HANDLERS`), by a sentence (`PLAIN`), or
as a limit (`health.jobs.limits`). Then it adds what is known of any waiting job: the expected start, earlier runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from health.jobs import machines
from health.jobs.ended import describe_run
from health.jobs.limits import NamedLimit, describe_limit, parse_limit, select_limits
from health.jobs.model import (
    FAR,
    Answer,
    Fact,
    Job,
    JobCause,
    Partition,
    Sure,
    World,
    count,
    duration,
    list_briefly,
    minutes,
    moment,
    safe,
)
from init.slurm.conf import expand
from init.slurm.node import PREFIX

SQUEUE = "squeue"
SHOWN = 4  # runs
# The AdminComment of a job that minivm submitted again, and the jobs that slurmctld had lost.
BACK_FOR = re.compile(rf"{PREFIX} job (\d+) again,(?: first job (\d+),)?", re.ASCII)
_DEPENDENCY = re.compile(r"([a-z]+):(\d{1,10})(?:_(\d{1,10}|\*))?(?:\+(\d{1,9}))?(?:\((\w+)\))?", re.ASCII)
# Reasons that need no further look: sentence, cause, advice. {id} is the job's number.
PLAIN: dict[str, tuple[str, JobCause, tuple[str, ...]]] = {
    "Cleaning": ("its last run is still being cleaned up", JobCause.CLUSTER, ()),
    "SchedDefer": ("the scheduler starts no job at submission here; it looks soon", JobCause.CLUSTER, ()),
    "JobHoldMaxRequeue": (
        "it was requeued too often, so Slurm holds it",
        JobCause.CLUSTER,
        ("find out why its runs ended: minivm job shows them", "an operator releases it: scontrol release {id}"),
    ),
    "DeadLine": (
        "it can no longer end before its --deadline",
        JobCause.REQUEST,
        ("submit it with a later --deadline or a shorter --time",),
    ),
    "InvalidQOS": (
        "its QOS does not exist or is not yours",
        JobCause.REQUEST,
        ("see yours: sacctmgr show associations user=$USER format=account,qos", "scontrol update jobid={id} qos=..."),
    ),
    "QOSNotAllowed": (
        "the partition or the account does not take its QOS",
        JobCause.REQUEST,
        ("scontrol update jobid={id} qos=...",),
    ),
    "MaxMemPerLimit": (
        "it asks for more memory than the partition lets one job have",
        JobCause.LIMIT,
        ("ask for less: scontrol update jobid={id} minmemorynode=...",),
    ),
    "ReservationDeleted": (
        "its reservation was deleted",
        JobCause.PERSON,
        ("scontrol update jobid={id} reservationname=  (without one)",),
    ),
    "ReservationInvalid": ("its reservation is not valid for it", JobCause.REQUEST, ("see scontrol show reservation",)),
    "SystemFailure": ("Slurm could not start it", JobCause.CLUSTER, ("tell an operator",)),
    "JobLaunchFailure": ("its launch failed", JobCause.CLUSTER, ("tell an operator",)),
    "FrontEndDown": ("a front end of Slurm is down", JobCause.CLUSTER, ()),
    "FedJobLock": ("another cluster of the federation decides about it", JobCause.CLUSTER, ()),
    "BurstBufferResources": ("the burst buffer is full", JobCause.CLUSTER, ()),
    "BurstBufferStageIn": ("its files are being staged in", JobCause.CLUSTER, ()),
    "BurstBufferOperation": ("an operation of the burst buffer failed", JobCause.CLUSTER, ("tell an operator",)),
    "MaxPoweredUpNodes": ("as many nodes are switched on as the site allows", JobCause.CLUSTER, ()),
    "MpiPortsBusy": ("all ports for MPI of its nodes are in use", JobCause.CLUSTER, ()),
    "NvidiaImexChannels": ("all IMEX channels are in use", JobCause.CLUSTER, ()),
    "Prolog": ("the prolog runs on its nodes", JobCause.CLUSTER, ()),
}
# Reasons of older releases of Slurm, which do not name the limit.
OLD_REASONS = {
    "AssociationJobLimit": "the account's limit of jobs is reached",
    "AssociationResourceLimit": "a limit of the account is reached",
    "AssociationTimeLimit": "the account's limit of time is reached",
    "QOSJobLimit": "the QOS's limit of jobs is reached",
    "QOSResourceLimit": "a limit of the QOS is reached",
    "QOSTimeLimit": "the QOS's limit of time is reached",
    "QOSUsageThreshold": "the account's usage is above what the QOS allows",
    "AccountingPolicy": "the accounting database refuses the job",
}
# Reasons about the job's account.
OF_ACCOUNTS = {
    "InvalidAccount": "its account does not exist, or its user is not in it any more",
    "AccountNotAllowed": "the partition does not take its account",
}
# Reasons about nodes, or none yet.
BY_NODES = ("Resources", "ReqNodeNotAvail", "NodeDown", "BadConstraints", "Constraints", "None", "")
# Reasons of jobs that start when it is their turn: no limit, dependency or hold keeps them.
WAIT_FOR_TURN = ("Priority", "Resources", "None")


def list_dependencies(job: Job) -> list[str]:
    """Return the numbers of the first jobs on which the job depends."""
    return list(dict.fromkeys(number for _, number, *_ in _DEPENDENCY.findall(job.dependency[:8192])))[:6]


def explain(job: Job, world: World, now: float) -> Answer:
    """Explain a waiting job."""
    answer = _explain_reason(job, world, now)
    facts = [Fact(f"the reason is {safe(job.reason or 'None', 60)}{_describe_detail(job)}", SQUEUE)]
    unknown = list(answer.unknown)
    if job.reason.startswith("JobHeld"):
        pass  # Slurm keeps the estimate from before the hold
    elif now < job.started < now + FAR:
        facts.append(
            Fact(f"Slurm expects to start it by {moment(job.started)}, in {duration(job.started - now)}", SQUEUE)
        )
    elif job.started > now:
        unknown.append("when it starts: it waits behind a job without time limit")
    elif answer.cause in (JobCause.CLUSTER, JobCause.LIMIT, JobCause.MACHINE):
        unknown.append("when it starts: Slurm has no estimate yet")
    if job.admin_comment.startswith(PREFIX):  # a site's own comment is not for users
        facts.append(Fact(f"minivm noted: {safe(job.admin_comment.removeprefix(PREFIX))}", "the job's AdminComment"))
    if job.restarts:
        facts.append(Fact(f"it was requeued {count(job.restarts, 'time')}", SQUEUE))
    facts += [Fact(describe_run(number, run), "sacct") for number, run in enumerate(world.history, 1)][-SHOWN:]
    return replace(answer, evidence=(*facts, *answer.evidence), unknown=tuple(unknown))


def _describe_detail(job: Job) -> str:
    return f": {safe(job.detail)}" if job.detail and job.detail != job.reason else ""


def _explain_reason(job: Job, world: World, now: float) -> Answer:
    if job.reason in HANDLERS:
        return HANDLERS[job.reason](job, world, now)
    if plain := PLAIN.get(job.reason):
        sentence, cause, advice = plain
        return Answer(f"It waits: {sentence}.", cause, advice=tuple(text.format(id=job.shown) for text in advice))
    if limit := parse_limit(job.reason):
        return _explain_limit(job, world, limit)
    if job.reason in OLD_REASONS:
        return Answer(f"It waits: {OLD_REASONS[job.reason]}.", JobCause.LIMIT, unknown=("which limit it is",))
    return Answer(
        f"It waits, for a reason that minivm does not know: {safe(job.reason, 60)}.",
        JobCause.UNKNOWN,
        advice=("see `man squeue`, JOB REASON CODES, or ask an operator",),
    )


def _explain_limit(job: Job, world: World, limit: NamedLimit) -> Answer:
    matches = select_limits(limit, job, world.limits or ())
    facts = tuple(Fact(describe_limit(match, job), "scontrol show assoc_mgr") for match in matches[:3])
    unknown = () if matches else ("the limit's number: Slurm does not show it, or a parent account has it",)
    if limit.key == "MinTRESPJ" or limit.is_of_one_job:
        headline = limit.sentence if limit.key == "MinTRESPJ" else f"it asks for more than {limit.sentence}"
        advice = ("change the request, or use another QOS or account", f"scancel {job.shown}")
        return Answer(
            f"It cannot start as it is: {headline}.", JobCause.LIMIT, evidence=facts, advice=advice, unknown=unknown
        )
    return Answer(
        f"It waits: {limit.sentence} is reached.",
        JobCause.LIMIT,
        evidence=facts,
        advice=("it starts when jobs under the same limit end; squeue --me lists yours",),
        unknown=unknown,
    )


def _explain_nodes(job: Job, world: World, now: float) -> Answer:
    if world.nodes is None:
        return replace(machines.explain_queue(job, None), unknown=("which nodes would fit: Slurm did not list them",))
    if world.reservations and not machines.lacks_named_nodes(job, world.nodes):
        return _explain_reservation(job, world, now)
    return machines.explain_wait_for_nodes(job, world.nodes)


def _explain_turn(job: Job, world: World, now: float) -> Answer:
    """Explain a wait behind jobs of a higher priority: how many, the next one and the first one."""
    answer = _explain_nodes(job, world, now)
    own = next((each for each in world.waiting or () if each.id == job.id), None)
    if own is None:
        hidden = "which jobs are before it: the list of waiting jobs does not have it yet, or is hidden from users"
        return replace(answer, unknown=(*answer.unknown, hidden)) if world.waiting is not None else answer
    rivals = (each for each in world.waiting or () if each.reason in WAIT_FOR_TURN and each.partitions & own.partitions)
    # Of two with the same priority Slurm takes the earlier one first.
    before = sorted((each.priority, -each.id, safe(each.shown, 40)) for each in rivals)
    before = [each for each in before if each[:2] > (own.priority, -own.id)]
    where = f"in partition {safe(job.partition, 80)}"
    if not before:
        return replace(answer, unknown=(*answer.unknown, f"which jobs are before it: none that waits {where}"))
    (near, _, nearest), (high, _, first) = before[0], before[-1]
    text = f"{where} {count(len(before), 'waiting job')} {'is' if len(before) == 1 else 'are'} before it: "
    text += f"the next is {nearest} with priority {near}"
    text += f", the first {first} with {high}" if len(before) > 1 else ""
    text += f"; its own is {own.priority}"
    source = f"{SQUEUE}, {duration(world.waiting_age)} ago" if world.waiting_age >= 1 else SQUEUE
    if any("[" in shown for _, _, shown in before):
        text += " (an array counts as one job)"
    return replace(answer, evidence=(*answer.evidence, Fact(text, source)))


def _explain_dependency(job: Job, world: World, now: float) -> Answer:
    parts = _DEPENDENCY.findall(job.dependency[:8192])
    failed = [f"{kind}:{number}" for kind, number, _, _, state in parts if state == "failed"]
    facts = [Fact(f"--dependency={safe(job.dependency)}", SQUEUE)] if job.dependency else []
    for _, number, *_ in parts[:6] if world.related_jobs is not None else ():
        facts.append(_describe_dependency(number, world.related_jobs or ()))
    if job.reason == "DependencyNeverSatisfied" or failed:
        failed_text = f" ({list_briefly(failed)})" if failed else ""
        return Answer(
            f"It can never start: a job that it depends on did not end as required{failed_text}.",
            JobCause.REQUEST,
            evidence=tuple(facts),
            advice=(
                f"drop the dependency: scontrol update jobid={job.shown} dependency=",
                f"or cancel it: scancel {job.shown}",
                "--kill-on-invalid-dep=yes at submission lets Slurm do that",
            ),
        )
    if job.dependency.startswith("singleton"):
        headline = "It waits until your earlier jobs of the same name have ended (--dependency=singleton)."
    else:
        awaited = (_describe_awaited(kind, number, delay) for kind, number, _, delay, _ in parts)
        headline = f"It waits for {list_briefly(awaited) or 'another job'}."
    return Answer(
        headline, JobCause.REQUEST, evidence=tuple(facts), advice=("nothing to do: it becomes eligible then",)
    )


def _describe_awaited(kind: str, number: str, delay: str) -> str:
    if kind != "after":
        return f"job {number}"
    return f"{minutes(int(delay))} after the start of job {number}" if delay else f"the start of job {number}"


def find_jobs(number: str, jobs: Iterable[Job]) -> list[Job]:
    """Return the job, or the tasks of the array, with this number."""
    return [job for job in jobs if str(job.id) == number or job.shown.partition("_")[0] == number]


def _describe_dependency(number: str, related_jobs: Sequence[Job]) -> Fact:
    """Describe a job that another one depends on; of an array the task that did not end well."""
    jobs = find_jobs(number, related_jobs)
    bad = [other for other in jobs if other.has_ended and other.state != "COMPLETED"]
    for other in (bad or jobs)[:1]:
        code = f" with exit code {other.exit_code}" if bad and other.exit_code else ""
        return Fact(f"job {safe(other.shown, 40)} is {safe(other.state, 40).lower()}{code}", SQUEUE)
    return Fact(f"job {number} has ended and left slurmctld's memory, or never existed: minivm job {number}", SQUEUE)


def _explain_hold(job: Job, world: World, now: float) -> Answer:
    if (match := BACK_FOR.match(job.admin_comment)) and not job.restarts:
        return Answer(
            f"minivm submitted it again, held: slurmctld was killed before it had saved job {match[1]}, which may have"
            " run.",
            JobCause.CLUSTER,
            advice=(
                "look at the output of the first run",
                f"run it: scontrol release {job.shown}",
                f"or drop it: scancel {job.shown}",
            ),
        )
    if "launch failed" in job.detail.lower():
        last = world.history[-1] if world.history else None
        where = f" on {safe(last.nodes, 80)}" if last and last.nodes else ""
        hosts = set(expand(last.nodes)) if last else set()
        nodes = [node for node in world.nodes or () if node.name in hosts and not node.is_usable]
        if any(node.reason == machines.STARTED_TWICE for node in nodes):
            return Answer(
                f"It is held: slurmctld was killed just after it had started it{where}, started it again, and the node"
                " refused that. The first run has ended.",
                JobCause.CLUSTER,
                Sure.LIKELY,
                machines.list_facts(nodes),
                ("look at the output of the first run", f"run it again: scontrol release {job.shown}"),
            )
        missing = () if last else ("on which node: accounting has no record of that run",)
        return Answer(
            f"It is held because its launch failed{where}.",
            JobCause.MACHINE if nodes else JobCause.CLUSTER,
            Sure.LIKELY,
            machines.list_facts(nodes),
            (f"release it: scontrol release {job.shown}", "if it happens again, tell an operator the node"),
            (*missing, "whether an earlier start ran, as after a kill of slurmctld: its output shows that"),
        )
    again = " after a requeue" if "requeue" in job.detail.lower() or "REQUEUE_HOLD" in job.states else ""
    if job.reason == "JobHeldUser":
        return Answer(
            f"It is held{again} by its user ({safe(job.user, 40)}), by --hold, scontrol hold or a requeue with hold.",
            JobCause.PERSON,
            advice=(f"release it: scontrol release {job.shown}",),
        )
    return Answer(
        f"It is held{again} by an operator of Slurm.",
        JobCause.PERSON,
        Sure.LIKELY,
        advice=("only an operator can release it: ask why it is held",),
        unknown=("which operator: Slurm does not record that",),
    )


def _explain_begin_time(job: Job, world: World, now: float) -> Answer:
    at = job.eligible if job.eligible > now else job.started
    again = job.restarts > 0 or "requeue" in job.detail.lower()
    when = f" until {moment(at)} (in {duration(at - now)})" if at > now else ""
    if again:
        headline = f"It was requeued and waits{when}: Slurm gives nodes time to end its last run."
        return Answer(headline, JobCause.CLUSTER, advice=("nothing to do",))
    advice = (f"start it earlier: scontrol update jobid={job.shown} starttime=now",)
    return Answer(f"It waits{when} because of --begin.", JobCause.REQUEST, advice=advice)


def _find_partitions(job: Job, world: World) -> list[Partition]:
    names = set(job.partition.split(","))
    return [partition for partition in world.partitions or () if partition.name in names]


def _explain_partition_time(job: Job, world: World, now: float) -> Answer:
    facts = tuple(
        Fact(
            f"partition {safe(partition.name, 80)} allows {minutes(partition.max_minutes)};"
            f" it asks for {minutes(job.limit)}",
            "scontrol show partition",
        )
        for partition in _find_partitions(job, world)
    )
    most = max((partition.max_minutes or 0 for partition in _find_partitions(job, world)), default=0)
    option = f"scontrol update jobid={job.shown} timelimit={most}" if most else "ask for a shorter --time"
    return Answer(
        "It cannot start: its --time is longer than the partition allows.",
        JobCause.LIMIT,
        evidence=facts,
        advice=(option, "or another partition: sinfo -o '%P %l'"),
    )


def _explain_partition_config(job: Job, world: World, now: float) -> Answer:
    """Name what the partition does not take: the job's account, its QOS, or something that Slurm does not tell."""
    partitions = _find_partitions(job, world)
    shown = safe(job.partition, 80)
    facts = tuple(
        Fact(f"partition {safe(partition.name, 80)}: {name} {safe(value, 120)}", "scontrol show partition")
        for partition in partitions
        for name, value in (
            ("AllowAccounts", partition.accounts),
            ("DenyAccounts", partition.denied_accounts),
            ("AllowQos", partition.allowed_qos),
        )
        if value
    )
    advice = (f"choose another partition: scontrol update jobid={job.shown} partition=...",)
    for what, name, refused in (
        ("account", job.account, all(_refuses_account(partition, job.account) for partition in partitions)),
        ("QOS", job.qos, all(_refuses(partition.allowed_qos, job.qos) for partition in partitions)),
    ):
        if partitions and refused:
            headline = f"It cannot start: partition {shown} does not take its {what}, {safe(name, 40)}."
            change = f"or another {what}: scontrol update jobid={job.shown} {what.lower()}=..."
            return Answer(headline, JobCause.REQUEST, evidence=facts, advice=(*advice, change))
    return Answer(
        f"It cannot start: partition {shown} does not allow the request.",
        JobCause.REQUEST,
        evidence=facts,
        advice=(*advice, f"see scontrol show partition {shown}"),
        unknown=("what of the request it is",),
    )


def _refuses_account(partition: Partition, account: str) -> bool:
    return _refuses(partition.accounts, account) or account in partition.denied_accounts.split(",")


def _refuses(allowed: str, name: str) -> bool:
    return bool(allowed) and allowed != "ALL" and name not in allowed.split(",")


def _explain_partition_nodes(job: Job, world: World, now: float) -> Answer:
    facts = []
    for partition in _find_partitions(job, world):
        most = "any number of" if partition.max_nodes is None else f"{partition.min_nodes} to {partition.max_nodes}"
        nodes = count(partition.total_nodes, "node")
        text = f"partition {safe(partition.name, 80)} has {nodes} and allows {most} for a job"
        facts.append(Fact(f"{text}; the job asks for {job.node_count}", "scontrol show partition"))
    if world.nodes is not None:
        fit = machines.judge(job, world.nodes)
        if fit.never:
            answer = machines.explain_never(job, fit)
            return replace(answer, evidence=(*facts, *answer.evidence))
        if fit.without_held:
            return machines.explain_held_nodes(job, fit, fit.held)
    return Answer(
        "It cannot start: it asks for more or fewer nodes than the partition allows, or than are up.",
        JobCause.LIMIT,
        Sure.LIKELY,
        tuple(facts),
        (f"scontrol update jobid={job.shown} numnodes=...", "or another partition"),
    )


def _explain_partition_down(job: Job, world: World, now: float) -> Answer:
    facts = tuple(
        Fact(
            f"partition {safe(partition.name, 80)} is {list_briefly(sorted(partition.states)) or 'not up'}",
            "scontrol show partition",
        )
        for partition in _find_partitions(job, world)
    )
    return Answer(
        f"It waits: an operator has switched off partition {safe(job.partition, 80)}.",
        JobCause.PERSON,
        Sure.LIKELY,
        facts,
        (f"wait, or choose another: scontrol update jobid={job.shown} partition=...",),
        ("until when: Slurm records no reason for it",),
    )


def _explain_reservation(job: Job, world: World, now: float) -> Answer:
    named = [reservation for reservation in world.reservations or () if reservation.name in job.reservation.split(",")]
    facts = [
        Fact(
            f"reservation {safe(reservation.name, 80)}: {safe(reservation.nodes, 120) or 'no nodes'},"
            f" {moment(reservation.start)} to {moment(reservation.end)}",
            "scontrol show reservation",
        )
        for reservation in named or (world.reservations or ())[:3]
    ]
    if named and named[0].start > now:
        headline = (
            f"It waits for its reservation {safe(named[0].name, 80)}, which begins in {duration(named[0].start - now)}."
        )
        return Answer(headline, JobCause.REQUEST, evidence=tuple(facts), advice=("nothing to do",))
    if named:
        headline = f"It waits for free nodes in its reservation {safe(named[0].name, 80)}."
        return Answer(headline, JobCause.CLUSTER, evidence=tuple(facts))
    if job.reservation:
        headline = f"Its reservation {safe(job.reservation, 80)} does not exist now, or has no usable nodes."
        advice = (f"without it: scontrol update jobid={job.shown} reservationname=",)
        return Answer(headline, JobCause.REQUEST, Sure.LIKELY, tuple(facts), advice)
    return Answer(
        "It waits: the nodes that it could use are reserved.",
        JobCause.CLUSTER,
        Sure.LIKELY,
        tuple(facts),
        ("a --time that ends before a reservation begins may start earlier",),
    )


def _explain_licenses(job: Job, world: World, now: float) -> Answer:
    names = {re.split(r"[@:=*]", part)[0] for part in re.split(r"[,|]", job.licenses)}
    matching = [licence for licence in world.licenses or () if licence.name.partition("@")[0] in names]
    facts = tuple(
        Fact(
            f"licence {safe(licence.name, 80)}: {licence.used} of {licence.total} in use"
            + (f", {licence.reserved} reserved" if licence.reserved else ""),
            "scontrol show licenses",
        )
        for licence in matching
    )
    headline = f"It waits for licences: it asks for {safe(job.licenses, 120) or 'some'}."
    unknown = () if matching else ("how many are free: Slurm did not say",)
    return Answer(
        headline, JobCause.LIMIT, evidence=facts, advice=("it starts when other jobs return them",), unknown=unknown
    )


def _explain_array(job: Job, world: World, now: float) -> Answer:
    most = f" ({job.task_limit} at a time)" if job.task_limit else ""
    return Answer(
        f"It waits for other tasks of its array: --array limits how many run{most}.",
        JobCause.REQUEST,
        advice=(f"run more at a time: scontrol update jobid={job.shown.partition('_')[0]} arraytaskthrottle=...",),
    )


Handler = Callable[[Job, World, float], Answer]


def _explain_account(job: Job, world: World, now: float) -> Answer:
    """Name the account, and those that the user may use."""
    advice: tuple[str, ...] = ("choose another account: scontrol update jobid={id} account=...",)
    facts: tuple[Fact, ...] = (Fact(f"its account is {safe(job.account, 40)}", SQUEUE),) if job.account else ()
    if world.accounts:
        names = list_briefly(safe(name, 40) for name in world.accounts)
        facts += (Fact(f"user {safe(job.user, 40)} may use {names}", "sacctmgr"),)
    elif world.accounts is not None:
        facts += (Fact(f"user {safe(job.user, 40)} is in no account", "sacctmgr"),)
        advice = ("ask an operator to add the user to an account",)
    if job.reason == "AccountNotAllowed":
        advice = ("choose another partition: scontrol update jobid={id} partition=...", *advice)
    steps = tuple(text.format(id=job.shown) for text in advice)
    return Answer(f"It waits: {OF_ACCOUNTS[job.reason]}.", JobCause.REQUEST, evidence=facts, advice=steps)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(OF_ACCOUNTS, _explain_account),
    **dict.fromkeys(BY_NODES, _explain_nodes),
    "Priority": _explain_turn,
    "Dependency": _explain_dependency,
    "DependencyNeverSatisfied": _explain_dependency,
    "JobHeldUser": _explain_hold,
    "JobHeldAdmin": _explain_hold,
    "BeginTime": _explain_begin_time,
    "PartitionTimeLimit": _explain_partition_time,
    "TimeLimit": _explain_partition_time,
    "PartitionNodeLimit": _explain_partition_nodes,
    "PartitionConfig": _explain_partition_config,
    "PartitionDown": _explain_partition_down,
    "PartitionInactive": _explain_partition_down,
    "Reservation": _explain_reservation,
    "Licenses": _explain_licenses,
    "JobArrayTaskLimit": _explain_array,
}
