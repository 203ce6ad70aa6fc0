"""Explain why a job ended, from its states, exit codes, steps and nodes. Pure.

A fault of the machine is never called the user's, nor the reverse, without a word on how sure that is: an exit code
alone is the program's own, and a node that was drained meanwhile makes it doubtful.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from health.jobs import machines
from health.jobs.model import (
    Answer,
    Fact,
    Job,
    JobCause,
    JobNode,
    JobStep,
    Sure,
    World,
    duration,
    list_briefly,
    minutes,
    moment,
    safe,
    signal_name,
)
from init.slurm.conf import expand
from init.slurm.node import PREFIX

SACCT = "sacct"
TWICE_S = 60.0  # from a refused second start to the end of the job
LAUNCH_S = 300.0  # of a prolog and the start of a script
# From the end of a preempted job to the start of the job that took its place: until its processes have ended (KillWait,
# 30 s) and the epilog has run (PrologEpilogTimeout, 60 s), and until the scheduler looks again.
CAME_S = 120.0
AFTER = 900.0  # a check may see a machine's fault minutes after the job has died of it
NO_OUTPUT = 53  # slurmd's own "signal" for an output file or directory that it cannot open
NOT_STARTED = 125  # of a container, as with docker (images/src/containers/container)
SHELL = {126: "a command could not be executed", 127: "a command was not found"}
MEMORY_COMMENT = "memory limit"
AGAIN = f"{PREFIX} runs again without"  # of `health.jobs.requeue`: it is about the run before
# Comments that end no job: also of `init.state.bring_back` and `health.active.run`.
ENDS_NOTHING = re.compile(rf"{AGAIN}|{PREFIX} job \d+ again,|{PREFIX} rate ", re.ASCII)
SHOWN_STEPS = 4


def explain(job: Job, world: World, now: float) -> Answer:
    comment = job.admin_comment if job.admin_comment.startswith(PREFIX) else ""  # a site's comment is not for users
    # A requeued job keeps the comment of its last run: a person cancelled it since, or it has not started again.
    ran_before = bool(job.restarts or world.history)
    if job.state == "CANCELLED" and (job.killer not in ("", "root", "slurm") or (ran_before and not job.nodes)):
        comment = ""
    handler = HANDLERS.get(job.state, _explain_unknown)
    is_commented = comment and job.state != "COMPLETED" and not ENDS_NOTHING.match(comment)
    answer = _explain_comment(job, comment) if is_commented else handler(job, world)
    code = f"exit code {job.exit_code}" + (f", {signal_name(job.signal)}" if job.signal else "")
    facts = [Fact(f"state {safe(job.state, 40)}, {code}", job.source)]
    facts += [
        Fact(_name_step_of(_name_step(job, step), step.state, step.exit_code, step.signal), job.source)
        for step in _list_failed_steps(job)
    ]
    if comment:
        facts.append(Fact(f"minivm noted: {safe(comment.removeprefix(PREFIX))}", "the job's AdminComment"))
    facts += [Fact(describe_run(number, run), SACCT) for number, run in enumerate(world.history, 1)][-4:]
    return replace(answer, evidence=(*facts, *answer.evidence))


def _list_failed_steps(job: Job) -> list[JobStep]:
    return [step for step in job.steps if step.exit_code or step.signal or step.state == "OUT_OF_MEMORY"][:SHOWN_STEPS]


def _name_step(job: Job, step: JobStep) -> str:
    """Name a step as its user names the job: accounting calls a step of task 8_3 by the task's own number."""
    number, dot, name = step.id.partition(".")
    return f"{job.shown}.{name}" if dot and number == str(job.id) else step.id


def _name_step_of(name: str, state: str, code: int, signal: int) -> str:
    end = f"exit code {code}" if code or not signal else signal_name(signal)
    return f"step {safe(name, 40)}: {safe(state, 40)}, {end}"


def describe_run(number: int, run: Job) -> str:
    where = f" on {safe(run.nodes, 80)}" if run.nodes else ""
    comment = f" ({safe(run.admin_comment.removeprefix(PREFIX), 160)})" if run.admin_comment.startswith(PREFIX) else ""
    return f"run {number}{where} ended {moment(run.ended)} as {run_state(run)}{comment}, and the job was requeued"


def run_state(run: Job) -> str:
    """Return the end of an earlier run: accounting has a requeued one as PENDING too."""
    return "REQUEUED" if run.is_pending else safe(run.state, 40)


def _explain_comment(job: Job, comment: str) -> Answer:
    """Explain an end that minivm itself brought about; it wrote the reason into the job's AdminComment."""
    text = safe(comment.removeprefix(PREFIX)).strip().rstrip(".")
    if MEMORY_COMMENT in comment:
        return Answer(f"minivm ended it: {text}.", JobCause.REQUEST, advice=_advise_more_memory(job))
    return Answer(
        f"minivm ended it: {text}.",
        JobCause.CLUSTER,
        advice=("submit it again: nothing in your job caused it", "let it be requeued: --requeue, with checkpoints"),
    )


def _explain_completed(job: Job, world: World) -> Answer:
    return Answer("It ended well, with exit code 0.", JobCause.NONE)


def _doubt(job: Job, world: World, answer: Answer) -> Answer:
    """Weaken an answer that blames the program if a node of the job was found broken while it ran."""
    suspects = _find_suspects(job, world)
    if not suspects:
        missing = () if world.nodes is not None else ("the state of its nodes",)
        return replace(answer, unknown=(*answer.unknown, *missing))
    names = list_briefly(node.name for node in suspects)
    return replace(
        answer,
        headline=f"{answer.headline} A machine's fault is possible too: {names} was found broken while it ran.",
        cause=JobCause.MACHINE,
        sure=Sure.POSSIBLE,
        evidence=(*answer.evidence, *machines.list_facts(suspects)),
        advice=(
            f"submit it again without that node: sbatch --exclude={names}",
            *_advise_rerun(job, suspects),
            *answer.advice,
        ),
        unknown=(*answer.unknown, "whether the fault of the machine or the program came first"),
    )


def _advise_rerun(job: Job, suspects: list[JobNode]) -> tuple[str, ...]:
    names = ",".join(sorted(node.name for node in suspects if machines.has_verdict(node)))
    if not names or not job.batch or not job.requeues:
        return ()
    return (f"the policy slurm.requeue runs it again without {names} if it is `act`; `propose` only logs that",)


def _find_suspects(job: Job, world: World) -> list[JobNode]:
    hosts = set(expand(job.nodes[:65536]))
    return [
        node
        for node in world.nodes or ()
        if node.name in hosts
        and not node.is_usable
        and machines.find_cause(node)[0] is JobCause.MACHINE
        and job.started <= node.since <= job.ended + AFTER
    ]


def _explain_failed_job(job: Job, world: World) -> Answer:
    if any(step.state == "OUT_OF_MEMORY" for step in job.steps):
        step = next(step for step in job.steps if step.state == "OUT_OF_MEMORY")
        answer = _explain_out_of_memory(job, world)
        name = safe(_name_step(job, step), 40)
        if 0 < step.memory < _mebibytes(job.memory):
            own = f"its own memory, {step.memory}M of the job's {safe(job.memory, 40)}"
            head = f"Its step {name} was killed because it used all of {own}."
            advice = ("give the step more: srun with a larger --mem, or without one", answer.advice[-1])
            return replace(answer, headline=head, sure=Sure.LIKELY, advice=advice)
        head = f"Its step {name} was killed because the job used all of its memory{_format_limit(job)}."
        return replace(answer, headline=head, sure=Sure.LIKELY)
    if not job.nodes and not job.steps:
        return Answer(
            "Slurm refused it at submission or removed it before it had nodes; sbatch said why.",
            JobCause.REQUEST,
            Sure.LIKELY,
            (Fact(f"the reason is {safe(job.reason, 60)}", "squeue"),) if job.reason not in ("", "None") else (),
            ("check its --mem, --gres, --constraint and --nodes against sinfo -o '%n %c %m %G %f'",),
        )
    if job.reason == "SystemFailure":
        return Answer(
            "Slurm could not launch it; its own code did not run.",
            JobCause.CLUSTER,
            Sure.LIKELY,
            machines.list_facts([node for node in _find_hosts(job, world) if not node.is_usable]),
            ("submit it again", "if it happens again, tell an operator the node"),
        )
    if job.signal == NO_OUTPUT:
        return Answer(
            "Slurm could not open its output file or its directory, so its script did not run.",
            JobCause.REQUEST,
            Sure.LIKELY,
            (Fact(f"output {safe(job.output)}", job.source),) if job.output else (),
            ("check that the directory of --output exists on the nodes and is yours", "check your quota and --chdir"),
            ("whether the file system failed on that node",),
        )
    if job.exit_code == NOT_STARTED and not job.signal:
        return Answer(
            "A container of it was not started: exit code 125, and its output says why.",
            JobCause.REQUEST,
            Sure.LIKELY,
            advice=(
                "check the image's name, and whether its registry wants a login",
                "if it names the node, tell an operator",
            ),
            unknown=("whether a program of the job ended with 125 by itself",),
        )
    if job.signal or job.exit_code > 128:
        return _doubt(job, world, _explain_signal(job))
    meaning = SHELL.get(job.exit_code, "")
    last = next((step for step in _list_failed_steps(job) if not step.id.endswith((".batch", ".extern"))), None)
    where = f", first in step {safe(_name_step(job, last), 40)}" if last else ""
    head = f"Its own program ended with exit code {job.exit_code}{where}{f': {meaning}' if meaning else ''}."
    return _doubt(job, world, Answer(head, JobCause.CODE, Sure.LIKELY, advice=_advise_reading(job)))


def _explain_signal(job: Job) -> Answer:
    number = job.signal or job.exit_code - 128
    name = signal_name(number)
    if name == "SIGKILL":
        # Only accounting has steps, and only they say that a memory limit was reached.
        counted = ", and Slurm counts no memory limit as reached" if job.steps else ""
        return Answer(
            f"A process of it was killed by SIGKILL{counted}.",
            JobCause.UNKNOWN,
            Sure.POSSIBLE,
            advice=("see the end of its output", "check with seff whether its memory was nearly full"),
            unknown=("what sent SIGKILL: the program itself, a person on the node, or the kernel",),
        )
    meaning = {
        "SIGSEGV": "it accessed memory that is not its own",
        "SIGBUS": "it accessed memory or a mapped file that is gone; full /dev/shm does that too",
        "SIGABRT": "it aborted itself: an assertion, a failed library, or corrupted memory",
        "SIGFPE": "it divided by zero or the like",
        "SIGILL": "it was built for another processor",
        "SIGTERM": "something asked it to end",
        "SIGPIPE": "the reader of its output was gone",
        "SIGXFSZ": "a file became larger than allowed",
        "SIGXCPU": "it used more CPU time than `ulimit -t` allows",
    }.get(name, "")
    head = f"Its own program died of {name}{f': {meaning}' if meaning else ''}."
    return Answer(head, JobCause.CODE, Sure.LIKELY, advice=_advise_reading(job))


def _advise_reading(job: Job) -> tuple[str, ...]:
    if job.output == "/dev/null":
        return ("run it again with an --output: this one went to /dev/null",)
    return (f"read the last lines of {safe(job.output) or 'its output'}",)


def _mebibytes(text: str) -> float:
    """Read Slurm's 1024M or 1.50G; 0 for anything else."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)([KMGT])", text, re.ASCII)
    return float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}[match[2]] if match else 0


def _format_limit(job: Job) -> str:
    return f", {safe(job.memory, 40)}" if job.memory else ""


def _advise_more_memory(job: Job) -> tuple[str, ...]:
    option = "--mem-per-cpu" if job.memory_per_cpu and not job.memory_per_node else "--mem"
    return (f"submit it with a larger {option} (or less work at a time)", f"seff {job.shown} shows what it used")


def _explain_out_of_memory(job: Job, world: World) -> Answer:
    return Answer(
        f"It used all of its memory{_format_limit(job)} in all, and the kernel killed a process of it.",
        JobCause.REQUEST,
        advice=_advise_more_memory(job),
        unknown=("whether the program leaks or simply needs more",),
    )


def _explain_timeout(job: Job, world: World) -> Answer:
    if job.reason == "InactiveLimit":
        return Answer(
            "Slurm ended it because its salloc or srun did not answer for longer than InactiveLimit.",
            JobCause.LIMIT,
            advice=("keep the session open (tmux), or use sbatch",),
        )
    ran = f" after {duration(job.ended - job.started)}" if job.ended > job.started > 0 else ""
    answer = Answer(
        f"It reached its time limit of {minutes(job.limit)}{ran}.",
        JobCause.LIMIT,
        advice=(
            "submit it with a longer --time, or save checkpoints and continue",
            "--signal=B:USR1@300 warns it before",
        ),
        unknown=("whether it was about to end or hung: see when its output was last written",),
    )
    suspects = _find_suspects(job, world)
    if not suspects:
        return answer
    facts = (*answer.evidence, *machines.list_facts(suspects))
    return replace(answer, evidence=facts, unknown=(*answer.unknown, "whether a broken node made it slow"))


def _find_hosts(job: Job, world: World) -> list[JobNode]:
    hosts = set(expand(job.nodes[:65536]))
    return [node for node in world.nodes or () if node.name in hosts]


def _explain_node_fail(job: Job, world: World) -> Answer:
    hosts = _find_hosts(job, world)
    name = job.failed_node or (job.nodes if len(expand(job.nodes[:65536])) == 1 else "")
    failed = [node for node in hosts if node.name == name] or [node for node in hosts if not node.is_usable]
    facts = list(machines.list_facts([node for node in failed if not node.is_usable]))
    facts += [
        Fact(f"{safe(node.name, 80)} booted at {moment(node.booted)}, after the job had started", "scontrol show node")
        for node in failed
        if node.booted > job.started > 0
    ]
    which = safe(name, 120) if name else f"one of {safe(job.nodes, 120)}" if job.nodes else "a node"
    return Answer(
        f"Its node failed: slurmctld lost {which} while the job ran.",
        JobCause.MACHINE,
        Sure.CERTAIN if name else Sure.LIKELY,
        tuple(facts),
        ("submit it again: nothing in your job is known to have caused it", "--requeue lets Slurm do that by itself"),
        () if facts else ("why: the node takes jobs again, and Slurm keeps no reason of the past",),
    )


def _explain_cancelled(job: Job, world: World) -> Answer:
    waited = "while it waited to run again" if world.history else "before it started"
    when = "while it ran" if job.started and job.nodes else waited
    if not job.killer:
        return Answer(
            f"It was cancelled {when}.",
            JobCause.PERSON,
            Sure.LIKELY,
            unknown=("by whom: only accounting records that, and it did not say",),
        )
    if job.killer == job.user:
        return Answer(f"Its own user, {safe(job.user, 40)}, cancelled it {when}.", JobCause.PERSON)
    if job.killer in ("root", "slurm"):
        twice = [node for node in _find_hosts(job, world) if node.reason == machines.STARTED_TWICE]
        if any(abs(node.since - job.ended) <= TWICE_S for node in twice):
            return Answer(
                "Slurm ended it: slurmctld was killed just after it had started it, started it again, and the node"
                " refused that. With --no-requeue it does not run again.",
                JobCause.CLUSTER,
                Sure.LIKELY,
                machines.list_facts(twice),
                ("look at the output of the first run, and submit it again",),
            )
        if _was_never_launched(job):
            return _explain_launch_failed(job, world)
        return Answer(
            f"{job.killer} cancelled it {when}: an operator, or Slurm itself (an invalid dependency, a failed prolog of"
            " srun or salloc, a second start after a kill of slurmctld).",
            JobCause.PERSON,
            Sure.POSSIBLE,
            advice=("ask an operator",),
            unknown=("the reason: no comment was written",),
        )
    return Answer(
        f"{safe(job.killer, 40)} cancelled it {when}.", JobCause.PERSON, advice=(f"ask {safe(job.killer, 40)}",)
    )


def _was_never_launched(job: Job) -> bool:
    """Tell if root cancelled the job before its script ran: a batch script that Slurm saw end has a code or a signal.

    The script of a job that ran for longer may lack both because its node is gone.
    """
    if job.reason == "Prolog":
        return True
    own = [step for step in job.steps if not step.id.endswith(".extern")]
    is_early = job.ended - job.started <= LAUNCH_S
    return is_early and len(own) == 1 and own[0].id.endswith(".batch") and not own[0].has_code


def _explain_launch_failed(job: Job, world: World) -> Answer:
    """Explain a job that slurmd could not launch and could not requeue: slurmd cancels it, as root."""
    hosts = expand(job.nodes[:65536])
    where = f" on {safe(job.nodes, 80)}" if hosts else ""
    exclude = f", without that node: sbatch --exclude={safe(job.nodes, 80)}" if len(hosts) == 1 else ""
    return Answer(
        f"Its launch failed{where}, and it could not be queued again: the node could not run its prolog"
        " or start its script. Its own code did not run.",
        JobCause.MACHINE,
        Sure.LIKELY,
        machines.list_facts([node for node in _find_hosts(job, world) if not node.is_usable]),
        (f"submit it again{exclude}", "tell an operator the node"),
        ("whether an operator cancelled it while its prolog ran",),
    )


def _explain_preempted(job: Job, world: World) -> Answer:
    """Name the job that took the place: Slurm does not record it, but it starts on the same nodes at once."""
    hosts = set(expand(job.nodes[:65536]))
    came = sorted(
        (
            other
            for other in world.related_jobs or ()
            if 0 <= other.started - job.ended <= CAME_S and other.id != job.id
        ),
        key=lambda other: other.started,
    )
    taker = next((other for other in came if hosts & set(expand(other.nodes[:65536]))), None)
    advice = ("submit it again, with --requeue and checkpoints", "ask which partition or QOS is not preempted")
    if taker is None:
        unknown = ("which job: Slurm does not record that with this one",)
        return Answer(
            "A job of a higher priority took its place (preemption).", JobCause.CLUSTER, advice=advice, unknown=unknown
        )
    preemptor = f"job {safe(taker.shown, 40)} of {safe(taker.user, 40)} in partition {safe(taker.partition, 80)}"
    start = f"{preemptor} started on {safe(taker.nodes, 80)} {duration(taker.started - job.ended)} after its end"
    return Answer(
        f"A job of a higher priority took its place (preemption): most likely {preemptor}.",
        JobCause.CLUSTER,
        evidence=(Fact(start, "squeue"),),
        advice=advice,
    )


def _explain_boot_fail(job: Job, world: World) -> Answer:
    """Explain an end for which no daemon of Slurm asks.

    slurmctld sets BOOT_FAIL, with the reason JobLaunchFailure, only where a request to requeue the job says that the
    configuration of its nodes failed (JOB_RECONFIG_FAIL), and the job has --no-requeue or no script. Programs that
    start nodes make such requests, and the job's own user may.
    """
    answer = Answer(
        "A program told Slurm that its nodes could not be configured for it.",
        JobCause.UNKNOWN,
        Sure.POSSIBLE,
        advice=("submit it again", "if it happens again, tell an operator the node"),
        unknown=("which program: one that starts nodes, or one of the job's own user",),
    )
    return _doubt(job, world, answer)


def _explain_deadline(job: Job, world: World) -> Answer:
    return Answer(
        "It could not end before its --deadline, so Slurm removed it.",
        JobCause.REQUEST,
        advice=("submit it with a later --deadline or a shorter --time",),
    )


def _explain_unknown(job: Job, world: World) -> Answer:
    return Answer(f"It ended as {safe(job.state, 40)}, which minivm does not know.", JobCause.UNKNOWN)


def _explain_revoked(job: Job, world: World) -> Answer:
    return Answer("Another cluster of the federation runs it.", JobCause.NONE)


HANDLERS: dict[str, Callable[[Job, World], Answer]] = {
    "COMPLETED": _explain_completed,
    "FAILED": _explain_failed_job,
    "OUT_OF_MEMORY": _explain_out_of_memory,
    "TIMEOUT": _explain_timeout,
    "NODE_FAIL": _explain_node_fail,
    "CANCELLED": _explain_cancelled,
    "PREEMPTED": _explain_preempted,
    "BOOT_FAIL": _explain_boot_fail,
    "DEADLINE": _explain_deadline,
    "REVOKED": _explain_revoked,
}
