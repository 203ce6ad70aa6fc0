"""Explain a job that has nodes: time left, its nodes, its use, its output. Pure."""

from __future__ import annotations

from health.jobs import machines
from health.jobs.model import Answer, Fact, Job, JobCause, JobNode, Sure, World
from health.jobs.text import count, duration, listed, minutes, moment, safe, size
from init.slurm.conf import expanded

SILENCE = 1800.0  # seconds without output after which the page says so first
NEARLY = 0.9
MIB = 1 << 20


def explain(job: Job, world: World, now: float) -> Answer:
    hosts = set(expanded(job.nodes[:65536]))
    held = [node for node in world.nodes or () if node.name in hosts and not node.is_usable]
    facts, advice, unknown = _use(job, world, now)
    facts = [*_time(job, now), *machines.facts(held), *facts]
    if world.nodes is None:
        unknown.append("the state of its nodes")
    head, cause, sure = _head(job, held, world, now)
    return Answer(head, cause, sure, tuple(facts), tuple(advice), tuple(unknown))


def _head(job: Job, held: list[JobNode], world: World, now: float) -> tuple[str, JobCause, Sure]:
    where = f" on {safe(job.nodes, 120)}" if job.nodes else ""
    ran = f" for {duration(now - job.started)}" if 0 < job.started <= now else ""
    if "COMPLETING" in job.states:
        return f"It has ended; its nodes{where} are being cleaned up.", JobCause.NONE, Sure.CERTAIN
    if "CONFIGURING" in job.states or job.reason == "Prolog":
        return f"It has its nodes{where}; they boot or run the prolog before it starts.", JobCause.CLUSTER, Sure.CERTAIN
    if job.states & {"SUSPENDED", "STOPPED"}:
        return (
            f"It is suspended{where}: an operator or a job of higher priority stopped it.",
            JobCause.UNKNOWN,
            Sure.LIKELY,
        )
    lost = [node for node in held if node.states & {"DOWN", "NOT_RESPONDING"}]
    if lost:
        names = listed(node.name for node in lost)
        return (
            f"It runs{where}{ran}, but {names} does not answer: it may end as NODE_FAIL.",
            JobCause.MACHINE,
            Sure.LIKELY,
        )
    if held:
        names = listed(node.name for node in held)
        verb = "takes" if len(held) == 1 else "take"
        return f"It runs{where}{ran}. {names} {verb} no new jobs; this one may go on.", JobCause.NONE, Sure.CERTAIN
    if world.output_age is not None and world.output_age > SILENCE:
        return (
            f"It runs{where}{ran}, and has written nothing for {duration(world.output_age)}: it may hang.",
            (JobCause.UNKNOWN),
            Sure.POSSIBLE,
        )
    return f"It runs{where}{ran}.", JobCause.NONE, Sure.CERTAIN


def _time(job: Job, now: float) -> list[Fact]:
    if job.limit is None:
        return [Fact("it has no time limit", "squeue")]
    left = job.started + job.limit * 60 - now
    state = f"{duration(left)} are left" if left > 0 else "which is over; Slurm ends it now"
    return [Fact(f"its time limit is {minutes(job.limit)}: {state} (until {moment(now + left)})", "squeue")]


def _use(job: Job, world: World, now: float) -> tuple[list[Fact], list[str], list[str]]:
    facts: list[Fact] = []
    advice: list[str] = []
    unknown: list[str] = []
    if world.output_age is not None:
        facts.append(Fact(f"its output was last written {duration(world.output_age)} ago", safe(job.output)))
    elif job.output:
        unknown.append(f"when its output was last written: {safe(job.output)} is not readable here")
    if not world.usage:
        unknown.append("what it uses: Slurm has figures from the second sample on, after a minute")
        return facts, advice, unknown
    used = sum(memory for _, memory, _ in world.usage) / MIB
    given = (job.memory_per_node * max(1, job.node_count)) or job.memory_per_cpu * job.cpus
    share = f" of {size(given)} ({100 * used / given:.0f} %)" if given else ""
    facts.append(
        Fact(f"it uses {size(used)} of memory now{share}".replace("of memory now of", "of memory now, of"), "sstat")
    )
    elapsed, cpu = now - job.started, sum(seconds for _, _, seconds in world.usage)
    if job.cpus and elapsed > 0:
        part = 100 * cpu / (elapsed * job.cpus)
        facts.append(Fact(f"it has used {part:.0f} % of its {count(job.cpus, 'CPU')} so far", "sstat"))
    if given and used > NEARLY * given:
        advice.append("its memory is nearly full: the kernel kills it at the limit")
    return facts, advice, unknown
