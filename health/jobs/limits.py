"""The limit that a waiting job's reason names, such as QOSMaxCpuPerUserLimit or AssocGrpGRES. Pure.

`parse_limit` reads the reason; `select_limits` finds the limits of that kind among those that Slurm lists, and
`describe_limit` puts one into words, with its use and what the job asks for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from health.jobs.model import Job, UsageLimit, minutes, safe, size

LIMITED_RESOURCES = {
    "cpu": "CPUs", "mem": "memory", "memory": "memory", "node": "nodes", "gres": "GPUs or other generic resources",
    "license": "licences", "bb": "burst buffer", "energy": "energy", "billing": "billing units",
    "unknown": "a resource",
    "jobs": "running jobs", "submitjobs": "submitted jobs", "submitjob": "submitted jobs", "wall": "wall time",
    "wallduration": "wall time",
}  # fmt: skip
_REASON = re.compile(
    r"(?P<by>QOS|Assoc|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>Cpu|CPU|Memory|Mem|Node|GRES|License|BB|Energy|Billing|Unknown|SubmitJobs|SubmitJob|Jobs|WallDuration|Wall)"
    r"(?P<run>RunMinutes|RunMins|Minutes)?(?P<per>PerJob|PerUser|PerNode|PerAccount)?(?:Limit|NotSatisfied)?"
)
_OF = {"PerJob": "for one job", "PerUser": "for one user", "PerNode": "on one node", "PerAccount": "for one account"}
_KEYS = {"PerUser": "PU", "PerAccount": "PA", "PerJob": "PJ", "PerNode": "PN", "": ""}
_TRES = {"cpu": "cpu", "mem": "mem", "memory": "mem", "node": "node", "gres": "gres", "license": "license", "bb": "bb",
         "energy": "energy", "billing": "billing"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedLimit:
    """A limit that a reason names."""

    holder: str  # QOS, Assoc, ""
    key: str  # GrpTRES, MaxTRESPU, MaxJobsPU, MaxWallPJ
    resource: str  # cpu, gres; "" for counts and wall time
    sentence: str
    is_of_one_job: bool  # the job alone exceeds it: it never starts as it is


def parse_limit(reason: str) -> NamedLimit | None:
    """Parse a reason; None if it names no limit."""
    match = _REASON.fullmatch(reason)
    if match is None:
        return None
    holder, kind, per, run = match["by"], match["kind"], match["per"] or "", match["run"] or ""
    resource = match["what"].lower()
    by = {"QOS": "the QOS", "Assoc": "the account", "": "the QOS"}[holder]
    resource_text = LIMITED_RESOURCES[resource]
    if run:
        resource_text = (
            f"minutes of {resource_text}"
            if run == "Minutes"
            else f"minutes of {resource_text} that running jobs have left"
        )
    if kind == "Min":
        return NamedLimit(
            "QOS",
            "MinTRESPJ",
            _TRES.get(resource, ""),
            f"the QOS requires more {resource_text} than the job asks for",
            True,
        )
    owner = "all jobs together" if kind == "Grp" else _OF.get(per, "one user")
    sentence = (
        f"the limit that {by} sets on {resource_text} {owner if owner.startswith(('for', 'on')) else f'for {owner}'}"
    )
    return NamedLimit(
        holder, _find_key(kind, resource, run, per), _TRES.get(resource, ""), sentence, per in ("PerJob", "PerNode")
    )


def _find_key(kind: str, what: str, run: str, per: str) -> str:
    """Return the limit's name in `scontrol show assoc_mgr`."""
    suffix = _KEYS[per] if kind == "Max" else ""
    if what in ("jobs", "submitjobs", "submitjob"):
        return f"{kind}{'Jobs' if what == 'jobs' else 'SubmitJobs'}{suffix}"
    if what.startswith("wall"):
        return f"{kind}Wall{suffix}"
    return f"{kind}TRES{'RunMins' if run.startswith('Run') else 'Mins' if run else ''}{suffix}"


def select_limits(limit: NamedLimit, job: Job, limits: Sequence[UsageLimit]) -> list[UsageLimit]:
    """Return the limits that the reason may mean, those that are reached or exceeded first."""
    candidates = [
        each
        for each in limits
        if each.key == limit.key
        and (each.resource == limit.resource or each.resource.startswith(f"{limit.resource}/"))
        and each.holder.startswith("QOS" if limit.holder != "Assoc" else ("user", "account"))
    ]
    return sorted(candidates, key=lambda each: (each.used is None, each.limit - (each.used or 0)))


def describe_limit(limit: UsageLimit, job: Job) -> str:
    """Describe a limit in numbers: "QOS normal: GrpTRES cpu 4, in use 4; the job asks for 2"."""
    amount = size if limit.resource == "mem" else minutes if "Wall" in limit.key else str
    limit_name = f"{limit.key}{f' {safe(limit.resource, 40)}' if limit.resource else ''}"
    used = "" if limit.used is None else f", in use {amount(limit.used)}"
    return f"{safe(limit.holder, 120)}: {limit_name} is {amount(limit.limit)}{used}{_describe_request(limit, job)}"


def _describe_request(limit: UsageLimit, job: Job) -> str:
    if "Wall" in limit.key:
        return f"; the job asks for {minutes(job.limit)}"
    requested = {"cpu": str(job.cpus or ""), "node": str(job.node_count or ""), "mem": job.memory}
    text = "" if "Mins" in limit.key else requested.get(limit.resource, "")
    return f"; the job asks for {safe(text, 40)}" if text else ""
