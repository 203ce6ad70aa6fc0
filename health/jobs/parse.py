"""Parse the JSON of squeue, sacct and scontrol, and the text of `scontrol show assoc_mgr` and sstat.

JSON, because job names, comments and paths are hostile: a separator of formatted fields may be part of them. The keys
used here are the same in data_parser v0.0.42 (Slurm 24.11) to v0.0.45 (26.05). A missing or odd value becomes
"unknown", since a page with a gap is better than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from health.jobs.model import Job, JobNode, JobStep, License, Partition, Reservation, UsageLimit, WaitingJob

_GRES = re.compile(r"(?:gres[/:])?([A-Za-z_]\w*)(?::([A-Za-z_][\w.-]*))?(?:[:=](\d{1,9}))?(?:\(.*\))?", re.ASCII)
_LIMIT = re.compile(r"(\d+)(?:\((\d+)(?:\.\d+)?\))?", re.ASCII)  # "4(2)", "60(12.50)", "4"; "N" is no limit
_ASSOC = re.compile(r"Account=(\S*) UserName=(\S*?)(?:\(\d+\))? ")
_MASK = re.compile(r"0x([0-9A-Fa-f]{1,65536})", re.ASCII)  # of an array's waiting tasks, in accounting
_RANGES = re.compile(r"\[([0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)\]", re.ASCII)
LONGEST_HOSTS = 65536
_ANNOUNCED = "Limits"  # "User Limits", "Account Limits" of a QOS
NO_TIME = 0xFFFFFFFE  # Slurm's NO_VAL: accounting has it as the start of a job that never started
NO_SIGNAL = 125  # Slurm's own number for out of memory


class Mapped:
    """Lenient reader of nested JSON objects."""

    def __init__(self, data: object) -> None:
        self.data: Mapping[str, Any] = data if isinstance(data, dict) else {}

    def at(self, *keys: str) -> object:
        value: object = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def text(self, *keys: str) -> str:
        value = self.at(*keys)
        return value if isinstance(value, str) else ""

    def number(self, *keys: str) -> int | None:
        """Return a number, plain or as {"set": true, "infinite": false, "number": 5}; None if unset or infinite."""
        value = self.at(*keys)
        if isinstance(value, dict):
            value = value.get("number") if value.get("set") and not value.get("infinite") else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return int(value) if abs(value) < 1 << 62 else None

    def count(self, *keys: str) -> int:
        return self.number(*keys) or 0

    def time(self, *keys: str) -> int:
        """Return a time in seconds since the epoch; 0 for one that has not come, or is no time."""
        value = self.count(*keys)
        return value if 0 < value < NO_TIME else 0

    def words(self, *keys: str) -> frozenset[str]:
        value = self.at(*keys)
        if isinstance(value, str):
            return frozenset(word for word in value.split(",") if word)
        return frozenset(word for word in value if isinstance(word, str)) if isinstance(value, list) else frozenset()

    def objects(self, *keys: str) -> list[Mapped]:
        value = self.at(*keys)
        return [Mapped(each) for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def parse_document(text: str) -> Mapped:
    """Parse a client's output; ValueError if it is not a JSON object."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return Mapped(data)


_WAITING = re.compile(r"^(\d{1,10})\|([^|\n]*)\|(\d{1,10})\|([^|\n]*)\|([^|\n]*)$", re.ASCII | re.MULTILINE)


def parse_queue(text: str) -> list[Job]:
    return [_parse_queued(item) for item in parse_document(text).objects("jobs")]


def parse_accounting(text: str) -> list[Job]:
    return [_parse_accounted(item) for item in parse_document(text).objects("jobs")]


def parse_nodes(text: str) -> tuple[JobNode, ...]:
    return tuple(_node(item) for item in parse_document(text).objects("nodes"))


def parse_partitions(text: str) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            name=item.text("name"),
            states=item.words("partition", "state"),
            max_minutes=item.number("maximums", "time"),
            max_nodes=item.number("maximums", "nodes"),
            min_nodes=item.count("minimums", "nodes"),
            max_memory_per_node=item.count("maximums", "partition_memory_per_node"),
            qos=item.text("qos", "assigned"),
            total_nodes=item.count("nodes", "total"),
            accounts=item.text("accounts", "allowed"),
            denied_accounts=item.text("accounts", "deny"),
            allowed_qos=item.text("qos", "allowed"),
        )
        for item in parse_document(text).objects("partitions")
    )


def parse_waiting(text: str) -> tuple[WaitingJob, ...]:
    """Parse squeue's lines ID|SHOWN|PRIORITY|PARTITIONS|REASON; another line is left out."""
    return tuple(
        WaitingJob(int(match[1]), match[2], int(match[3]), frozenset(match[4].split(",")), match[5])
        for match in _WAITING.finditer(text)
    )


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    return tuple(
        Reservation(
            name=item.text("name"),
            nodes=item.text("node_list"),
            start=item.time("start_time"),
            end=item.time("end_time"),
            users=item.text("users"),
            accounts=item.text("accounts"),
            flags=item.words("flags"),
        )
        for item in parse_document(text).objects("reservations")
    )


def parse_licenses(text: str) -> tuple[License, ...]:
    return tuple(
        License(item.text("LicenseName"), item.count("Total"), item.count("Used"), item.count("Reserved"))
        for item in parse_document(text).objects("licenses")
    )


def order_names(hosts: str) -> str:
    """Write w-[1,0] as w-[0-1]: slurmctld lists dynamic nodes in the order in which they came."""
    return _RANGES.sub(lambda match: f"[{_ranges(match[1])}]", hosts[:LONGEST_HOSTS]) + hosts[LONGEST_HOSTS:]


def _ranges(text: str) -> str:
    pairs = [part.partition("-") for part in text.split(",")]
    if any(len(first) != len(last or first) for first, _, last in pairs):
        return text  # 8-11 joins with no neighbour
    joined: list[tuple[str, str]] = []
    for first, last in sorted(((first, last or first) for first, _, last in pairs), key=lambda each: int(each[0])):
        if joined and len(joined[-1][1]) == len(first) and int(first) == int(joined[-1][1]) + 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return ",".join(first if first == last else f"{first}-{last}" for first, last in joined)


def _format_id(item: Mapped, array: tuple[str, ...], task: tuple[str, ...], tasks: tuple[str, ...]) -> str:
    """Return the id that people use: 12, 12_3, 12_[4-9], 12+1."""
    number, parent = item.count("job_id"), item.count(*array)
    if parent:
        waiting = item.text(*tasks)
        if waiting:
            return f"{parent}_[{_tasks(waiting)}]"
        index = item.number(*task)
        return f"{parent}_{index}" if index is not None else str(number)
    return str(number)


def _tasks(text: str) -> str:
    """Write accounting's mask 0xEA as squeue does: 1,3,5-7."""
    match = _MASK.fullmatch(text)
    bits = f"{int(match[1], 16):b}"[::-1] if match else ""
    runs = [(run.start(), run.end() - 1) for run in re.finditer("1+", bits)]
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs) or text


def _component(item: Mapped, shown: str, leader: int, offset: int | None) -> str:
    return f"{leader}+{offset}" if leader and offset is not None else shown


def _signal(item: Mapped) -> int:
    """Return the number of the signal that ended a job or step; 0 for none."""
    signal = item.count("exit_code", "signal", "id")
    return signal if signal != NO_SIGNAL else 0


def _parse_queued(item: Mapped) -> Job:
    shown = _format_id(item, ("array_job_id",), ("array_task_id",), ("array_task_string",))
    limit = item.at("time_limit")
    return Job(
        id=item.count("job_id"),
        command=item.text("command"),
        shown=_component(item, shown, item.count("het_job_id"), item.number("het_job_offset")),
        name=item.text("name"),
        user=item.text("user_name"),
        account=item.text("account"),
        partition=item.text("partition"),
        qos=item.text("qos"),
        states=item.words("job_state"),
        reason=item.text("state_reason"),
        detail=item.text("state_description"),
        submitted=item.time("submit_time"),
        eligible=item.time("eligible_time"),
        started=item.time("start_time"),
        ended=item.time("end_time"),
        evaluated=item.time("last_sched_evaluation"),
        limit=item.number("time_limit") if limit is not None else None,
        nodes=order_names(item.text("nodes")),
        node_count=item.count("node_count"),
        single_node=item.count("max_nodes") == 1,
        exclusive="none" in item.words("shared"),
        cpus=item.count("cpus"),
        cpus_per_task=max(1, item.count("cpus_per_task")),
        cpus_per_node=item.count("minimum_cpus_per_node"),
        memory_per_node=item.count("memory_per_node"),
        memory_per_cpu=item.count("memory_per_cpu"),
        memory=_tres(item.text("tres_alloc_str") or item.text("tres_req_str"), "mem"),
        gres_per_node=parse_gres(item.text("tres_per_node")),
        features=item.text("features"),
        required=item.text("required_nodes"),
        excluded=item.text("excluded_nodes"),
        licenses=item.text("licenses"),
        reservation=item.text("resv_name"),
        dependency=item.text("dependency"),
        exit_code=item.count("exit_code", "return_code"),
        signal=_signal(item),
        restarts=item.count("restart_cnt"),
        task_limit=item.count("array_max_tasks"),
        admin_comment=item.text("admin_comment"),
        system_comment=item.text("system_comment"),
        failed_node=item.text("failed_node"),
        output=item.text("stdout_expanded") or item.text("standard_output"),
        errors=item.text("stderr_expanded") or item.text("standard_error"),
        batch=item.at("batch_flag") is not False,
        is_held=item.at("hold") is True,
        requeues=item.at("requeue") is not False,
    )


def _parse_accounted(item: Mapped) -> Job:
    shown = _format_id(item, ("array", "job_id"), ("array", "task_id"), ("array", "task"))
    memory = [_amount(each) for each in item.objects("tres", "allocated") if each.text("type") == "mem"]
    requested = [_amount(each) for each in item.objects("tres", "requested") if each.text("type") == "mem"]
    leader = item.count("het", "job_id")
    return Job(
        id=item.count("job_id"),
        shown=_component(item, shown, leader, item.number("het", "job_offset")),
        name=item.text("name"),
        user=item.text("user"),
        account=item.text("account"),
        partition=item.text("partition"),
        qos=item.text("qos"),
        states=item.words("state", "current"),
        reason=item.text("state", "reason"),
        submitted=item.time("time", "submission"),
        eligible=item.time("time", "eligible"),
        started=item.time("time", "start"),
        ended=item.time("time", "end"),
        limit=item.number("time", "limit"),
        nodes="" if item.text("nodes") == "None assigned" else order_names(item.text("nodes")),
        node_count=item.count("allocation_nodes"),
        cpus=item.count("required", "CPUs"),
        memory_per_node=item.count("required", "memory_per_node"),
        memory_per_cpu=item.count("required", "memory_per_cpu"),
        memory=f"{(memory or requested)[0]}M" if memory or requested else "",
        exit_code=item.count("exit_code", "return_code"),
        signal=_signal(item),
        restarts=item.count("restart_cnt"),
        admin_comment=item.text("comment", "administrator"),
        system_comment=item.text("comment", "system"),
        failed_node=item.text("failed_node"),
        killer=item.text("kill_request_user"),
        source="sacct",
        output=item.text("stdout_expanded"),
        errors=item.text("stderr_expanded"),
        steps=tuple(_step(each) for each in item.objects("steps")),
    )


def _amount(item: Mapped) -> int:
    return item.count("count")


def _step(item: Mapped) -> JobStep:
    return JobStep(
        id=item.text("step", "id"),
        state=min(item.words("state"), default=""),
        exit_code=item.count("exit_code", "return_code"),
        signal=_signal(item),
        nodes=item.text("nodes", "range"),
        memory=next((_amount(each) for each in item.objects("tres", "allocated") if each.text("type") == "mem"), 0),
        has_code=item.number("exit_code", "return_code") is not None or _signal(item) != 0,
    )


def _node(item: Mapped) -> JobNode:
    return JobNode(
        name=item.text("name"),
        address=item.text("address"),
        states=item.words("state"),
        reason=item.text("reason"),
        author=item.text("reason_set_by_user"),
        since=item.count("reason_changed_at"),
        booted=item.count("boot_time"),
        partitions=item.words("partitions"),
        cpus=item.count("effective_cpus") or item.count("cpus"),
        cpus_used=item.count("alloc_cpus"),
        memory=max(0, item.count("real_memory") - item.count("specialized_memory")),
        memory_used=item.count("alloc_memory"),
        features=item.words("active_features") or item.words("features"),
        gres=parse_gres(item.text("gres")),
    )


def parse_gres(text: str) -> tuple[tuple[str, int], ...]:
    """Parse "gres/gpu:h100:2" or "gpu:h100:8(S:0-1),nvme:4"."""
    amounts = []
    for part in re.split(r",(?![^(]*\))", text):
        if match := _GRES.fullmatch(part.strip()):
            amounts.append((f"{match[1]}:{match[2]}" if match[2] else match[1], int(match[3] or 1)))
    return tuple(amounts)


def _tres(text: str, name: str) -> str:
    pairs = (pair.partition("=") for pair in text.split(","))
    return next((value for key, _, value in pairs if key == name), "")


def parse_lines(text: str) -> tuple[str, ...]:
    """Parse a client's list of one field: each value once, in order."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def parse_limits(text: str, user: str) -> tuple[UsageLimit, ...]:
    """Parse the limits that `scontrol show assoc_mgr` shows, with their use; of a QOS's users only this one."""
    return tuple(_parse_limits(text, user))


def _parse_limits(text: str, user: str) -> Iterator[UsageLimit]:
    holder = base = ""
    for line in text.splitlines():
        indent, stripped = len(line) - len(line.lstrip()), line.strip()
        if match := _ASSOC.search(line):
            holder = f"user {match[2]} in account {match[1]}" if match[2] else f"account {match[1]}"
            base, holder = "", holder if match[2] in ("", user) else ""
            continue
        if indent == 0:
            base = holder = f"QOS {stripped[4:].partition('(')[0]}" if stripped.startswith("QOS=") else ""
            continue
        if stripped.startswith("Comment="):
            continue
        if stripped.endswith(_ANNOUNCED):
            holder = ""
            continue
        if base and "=" not in stripped:
            # The next lines belong to this user or account: "alice(20001)", "physics".
            name = stripped.partition("(")[0]
            holder = f"{base} for user {name}" if name == user and "(" in stripped else ""
            if "(" not in stripped:
                holder = f"{base} for account {name}"
            continue
        if holder:
            yield from _parse_line(holder, stripped)


def _parse_line(holder: str, line: str) -> Iterator[UsageLimit]:
    """Parse "GrpJobs=N(0) GrpWall=N(0.00)" and "GrpTRES=cpu=4(2),mem=N(100)"."""
    for word in line.split():
        key, equals, value = word.partition("=")
        if not equals or not key.startswith(("Grp", "Max", "Min")):
            continue
        for part in value.split(","):
            resource, _, amounts = part.rpartition("=")
            if match := _LIMIT.fullmatch(amounts):
                yield UsageLimit(holder, key, resource, int(match[1]), int(match[2]) if match[2] else None)


def parse_usage(text: str) -> tuple[tuple[str, int, float], ...]:
    """Parse `sstat -nP --noconvert -o JobID,TRESUsageInTot`: the step's memory in bytes and its CPU seconds."""
    steps = []
    for line in text.splitlines():
        step, bar, values = line.partition("|")
        memory, cpu = _tres(values, "mem"), _tres(values, "cpu")
        if bar and re.fullmatch(r"[\w.+]+", step, re.ASCII) and memory.isdigit():
            steps.append((step, int(memory), _seconds(cpu)))
    return tuple(steps)


def _seconds(text: str) -> float:
    """Parse [days-]hours:minutes:seconds; 0 for anything else."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6}):(\d\d):(\d\d)(?:\.\d+)?", text, re.ASCII)
    if match is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 86400.0 + hours * 3600 + minutes * 60 + seconds
