"""Perform the decisions of `health.broker.step`: post the node's drain to Slurm and take it back.

`health.broker.__main__` calls `Broker.look` when verdicts change or time is up, and `Broker.answer` for each request on
the socket. A look reads the verdicts, asks `step` what to do, performs the actions, and calls `step` again with their
results until none is left. `Slurm` holds the calls to slurmctld; `look_for_remains` reads /proc for the processes of a
job that Slurm could not kill.

Each change of the verdicts costs slurmctld one call to look and one to act; without changes there are none. Counting
the other nodes with the same problem costs one sinfo and another look, only when a drain is due.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from ground.errors import counted
from ground.files import write_whole
from health import black_box
from health.broker import slurm_drains
from health.broker.decide import Act, BrokerNode, Enter, OtherNode, OtherNodes, asks_for_deep, read_gpus, reason
from health.broker.slurm_drains import Remains, Unkilled, find_cause, is_recorded
from health.broker.step import (
    Action,
    ApplyAct,
    AskNode,
    AskOtherNodes,
    AskRemains,
    BrokerInputs,
    Failed,
    Log,
    Memory,
    Now,
    describe_check,
    expect_drain,
    forget,
    hold_resumed,
    is_due,
    is_restless,
    step,
)
from health.ledger import Ledger
from health.places import Places, boot_id
from health.policy import BrokerPolicy, load_broker_policy, read_broker_policy
from health.rounds import deep_checks_run, read_index
from health.verdict import digest_published_scripts, is_of_script, read_verdicts
from init.errors import InitError
from init.slurm import client
from init.slurm.client import SlurmError

# The broker's calls to the controller, each with a deadline.


def parse_other_nodes(text: str, own: str) -> tuple[list[OtherNode], int]:
    """Parse sinfo's lines NAME|TIME|REASON; a node appears once per partition."""
    cells = ([cell.strip() for cell in line.split("|", 2)] for line in text.splitlines())
    rows = {row[0]: (row[1], row[2]) for row in cells if len(row) == 3}
    return [OtherNode(text, _time(at)) for name, (at, text) in rows.items() if name != own], len(rows)


def _time(text: str) -> float | None:
    """Parse a time; Slurm's clients print this machine's local time."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


class Slurm:
    """The controller's interface for the broker."""

    def __init__(self, name: str, controller: str) -> None:
        self.name = name
        self.controller = controller

    def node(self) -> BrokerNode | None:
        node = client.node(self.name, self.controller)
        if node is None:
            return None
        author, _, at = node.author.partition("@")
        return BrokerNode("DRAIN" in node.flags, node.reason, node.busy, author, _time(at))

    def require_node(self) -> BrokerNode:
        node = self.node()
        if node is None:
            raise SlurmError("find the node", f"slurmctld knows no node {self.name} yet")
        return node

    def other_nodes(self) -> tuple[list[OtherNode], int]:
        """Return the reasons of the other nodes, and the number of nodes."""
        text = client.run([client.SINFO, "--noheader", "--Node", "--format", "%N|%H|%E"], self.controller)
        return parse_other_nodes(text, self.name)

    def survey(self) -> OtherNodes:
        nodes, total = self.other_nodes()
        return OtherNodes(tuple(nodes), total)

    def change(self, act: Act) -> Act:
        if act.kind == "clear":
            self.undrain()
        else:
            self.drain(act.text)
        return act

    def drain(self, text: str) -> None:
        client.update(self.name, ["state=drain", f"reason={text}"], self.controller)

    def undrain(self) -> None:
        # Not "resume": that would bring up a node that is down for another reason.
        client.update(self.name, ["state=undrain"], self.controller)

    def cancel(self, job: int, text: str) -> bool:
        """Cancel a job that runs on this node, with the reason as its comment; tell whether it ran here."""
        command = [client.SQUEUE, "--noheader", "--nodelist", self.name, "--states", "R,S", "--format", "%A %i"]
        rows = (line.split() for line in client.run(command, self.controller).splitlines())
        # The bare number of an array's task may mean the whole array. A heterogeneous job is cancelled as a whole.
        shown = next((row[1].partition("+")[0] for row in rows if len(row) == 2 and row[0] == str(job)), "")
        if shown:
            client.comment([shown], text, self.controller)
            client.notify(shown, text, self.controller)
            client.run([client.SCANCEL, shown], self.controller)
        return bool(shown)


# Remains of a job that could not be killed, from /proc without files on which a hung process blocks the reader.
PROC = Path("/proc")
LEAST_BYTES, LEAST_INODES = 64 << 20, 256
NAMED = 3  # in a reason, which is short
STEP = "slurmstepd"


def remains_of_job(job: int, proc: Path = PROC) -> tuple[tuple[int, str], ...]:
    """Return pid and start of each process below the job's slurmstepds or in its cgroups."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    steps, remaining = set(), set()
    for pid in _list_pids(proc):
        name, fields = _stat(proc / str(pid))
        if not fields:
            continue
        parents[pid], starts[pid] = int(fields[1]), fields[19]
        if name == STEP and _is_own_process(proc / str(pid)):
            # Its own title, "slurmstepd: [46.batch]"; it does not hang.
            title = _read_text(proc / str(pid) / "cmdline")
            steps |= {pid} if f"[{job}." in title else set()
        elif f"/job_{job}/" in _read_text(proc / str(pid) / "cgroup"):
            remaining.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in steps | remaining} - remaining - steps:
        remaining |= more
    return tuple((pid, starts[pid]) for pid in sorted(remaining - steps))


def look_for_remains(unkilled: Unkilled | None, spool: Path, proc: Path = PROC) -> Remains:
    """Report which processes of the unkilled job have not ended, and whether the spool directory has room."""
    hanging: list[str] = []
    for pid, start in sorted({*unkilled.processes, *remains_of_job(unkilled.job, proc)} if unkilled else ()):
        if text := _describe_living(proc / str(pid), start):
            hanging.append(f"pid {pid} {text}")
    shown = hanging[:NAMED] + ([f"and {len(hanging) - NAMED} more"] if len(hanging) > NAMED else [])
    return Remains(tuple(shown), _describe_no_room(spool))


def _describe_living(process: Path, start: str) -> str:
    """Return name, state and place in the kernel of a process that has not ended, or "".

    A zombie counts while one of its threads does not end.
    """
    name, fields = _stat(process)
    if not fields or fields[19] != start:
        return ""
    threads = [(_stat(process / "task" / str(tid))[1], tid) for tid in _list_pids(process / "task")]
    states = [(fields[0], tid) for fields, tid in threads if fields and fields[0] not in "ZX"]
    if not states:
        return ""
    state, tid = min(states, key=lambda item: (item[0] != "D", item[1]))
    place = _read_text(process / "task" / str(tid) / "wchan").strip()
    return f"({name}) state {state}" + (f" in {place}" if place not in ("", "0") else "")


def _is_own_process(process: Path) -> bool:
    """Tell whether its real user is root: a user's setuid program may have any name, and is root's in /proc."""
    uids = _read_text(process / "status").partition("\nUid:")[2].split(maxsplit=1)
    return uids[:1] == [str(os.getuid())]


def _describe_no_room(spool: Path) -> str:
    try:
        room = os.statvfs(spool)
    except OSError as error:
        return f"{spool}: {error.strerror}"
    if room.f_bavail * room.f_frsize < LEAST_BYTES:
        return f"{spool} has {room.f_bavail * room.f_frsize >> 20} MiB left"
    if room.f_files and room.f_favail < LEAST_INODES:
        return f"{spool} has {room.f_favail} inodes left"
    return ""


def _list_pids(directory: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir(directory) if entry.name.isdecimal()]
    return []


def _stat(process: Path) -> tuple[str, list[str]]:
    """Return the name, which may hold any text, and the fields after it: the state first."""
    head, _, tail = _read_text(process / "stat").rpartition(")")
    fields = tail.split()
    return (head.partition("(")[2], fields) if len(fields) > 19 else ("", [])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


T = TypeVar("T")

LOOK_S = 5.0
# Shortest time between two questions to slurmctld, after jobs' ends, whether Slurm has drained the node.
ENDED_S = 300.0
# `failed`: a prolog or epilog failed. `ended`: jobs have ended. `unkillable`: Slurm could not kill a step.
QUESTIONS = ("gate", "look", "status", "forget", "deep", "failed", "ended", "unkillable")
SOON_S = 0.05
# How long slurmctld may be silent when Slurm cannot kill a step: a slurmd that reconfigures may sign nothing for 60 s.
KNOWN_WITHIN_S = 75.0


def clock() -> Now:
    return Now(time.time(), time.monotonic())


class Broker:
    """The node's memory of problems and drains, and the effects of each decision on Slurm and on disk."""

    def __init__(self, places: Places, slurm: Slurm, policy: BrokerPolicy | None = None) -> None:
        self.places = places
        self.slurm = slurm
        self.policy = policy or BrokerPolicy()
        self.memory = Memory()
        # The ignored policy file and its error.
        self.refused = ""
        # Last seen modification time of the directory of verdicts.
        self._changed_at = -1
        # The problems that the jobs' black boxes know; None: at the first look.
        self._problems: dict[str, str] | None = None
        # Jobs without a living slurmstepd, and when each is due; the time of the last look.
        self._dead: dict[int, float] = {}
        self._dead_looked = 0.0

    def look(self) -> None:
        """Read the verdicts, then decide and act until no action brings a new input."""
        began, inputs = clock(), self._read()
        last_inputs = None
        while inputs is not last_inputs:
            # A fresh steady clock for each step, since the controller may answer late; verdicts are judged as of one
            # moment.
            self.memory, actions = step(self.memory, inputs, replace(clock(), wall=began.wall))
            last_inputs = inputs
            for action in actions:
                inputs = self._perform(action, inputs)
        self._save()

    def _read(self) -> BrokerInputs:
        boot = boot_id()
        verdicts = tuple(read_verdicts(self.places.verdicts).values())
        by_scripts = any(is_of_script(verdict.check) for verdict in verdicts)
        index = read_index(self.places.index)
        return BrokerInputs(
            self.slurm.name,
            self.policy,
            boot,
            verdicts,
            read_gpus(self.places.memory("gpu_count"), boot),
            index if index and index.boot_id == boot else None,
            digest_published_scripts(self.places.scripts) if by_scripts else None,
            deep_checks_run(self.places.deep, boot),
        )

    def _perform(self, action: Action, inputs: BrokerInputs) -> BrokerInputs:
        """Perform an action; return the inputs with its result."""
        match action:
            case Log(text):
                log(text)
                return inputs
            case Enter():
                return replace(inputs, incidents={**inputs.incidents, action.check: self._enter(action)})
            case AskNode():
                return replace(inputs, node=_ask(self.slurm.require_node))
            case AskOtherNodes():
                # The node is asked again after that: a person may have drained it meanwhile.
                return replace(inputs, other_nodes=_ask(self.slurm.survey), node=None)
            case AskRemains():
                return replace(inputs, remains=look_for_remains(self.memory.slurm.unkilled, self.places.spool))
            case ApplyAct(act):
                return replace(inputs, changed=_ask(lambda: self.slurm.change(act)))

    def _enter(self, entry: Enter) -> int:
        try:
            ledger = Ledger(self.places.ledger)
            return ledger.enter(
                entry.uuid, entry.event, entry.since, entry.most, serial=entry.serial, model=entry.model
            )
        except OSError as error:
            log(f"cannot keep the ledger: {error}")
            return 0

    def answer(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Answer one request of the prolog, the command line, the runner or slurmstepd (`QUESTIONS`)."""
        ask = request.get("ask")
        if ask not in QUESTIONS:
            return {"error": f"unknown request {ask!r}; known: {', '.join(QUESTIONS)}"}
        if ask in ("failed", "ended"):
            # After jobs' ends ask slurmctld seldom, since a thousand nodes have many, but never skip the last end: a
            # node that Slurm has drained has no further job whose end could ask.
            now, next_look = clock(), self.memory.node_read_at + ENDED_S
            if ask == "failed" or now.steady >= next_look:
                self.memory = expect_drain(self.memory, now)
            else:
                self.memory = replace(self.memory, jobs_look=next_look)
            return {}
        if ask == "unkillable":
            job, asker = request.get("job"), request.get("pid")
            if not isinstance(job, int):
                return {"error": "wanted the number of a job"}
            return self._save_unkillable(job, asker if isinstance(asker, int) else 0)
        if ask == "deep":
            return {"deep": self._wants_deep_checks()}
        checks = request.get("checks", [])
        named = [str(check) for check in checks] if isinstance(checks, list) else []
        if ask == "forget":
            self._remember(forget(self.memory, named))
        if ask != "status":
            self.look()
        if ask == "gate" and self._stops_job(named):
            self._check_resumed()
        now = clock()
        decisions = {check: describe_check(self.memory, check, now) for check in named}
        # A job is kept off only for problems that drained the node, so the guard's exceptions stop no job.
        return {"decisions": decisions, "drained": self._stops_job(named), "said": self.memory.status_text}

    def _save_unkillable(self, job: int, asker: int) -> Mapping[str, object]:
        """Record the node's state and the processes that do not end, before slurmstepd drains the node.

        `asker` is the process that slurmstepd started for this question, in the job's cgroup.
        """
        at = clock()
        left = (process for process in remains_of_job(job) if process[0] != asker)
        processes = tuple((pid, start) for pid, start in left if _describe_living(PROC / str(pid), start))
        # slurmstepd waits for this answer. Without the node's state its drain would stay for a person.
        while isinstance(node := _ask(self.slurm.require_node), Failed):
            if clock().steady - at.steady >= KNOWN_WITHIN_S:
                log(f"the node's state before Slurm's drain is not known: {node.why}")
                break
            time.sleep(1.0)
        before = None if isinstance(node, Failed) else node
        unkilled = Unkilled(job, at.wall, at.wall, processes, before)
        if before is not None and (cause := find_cause(before)) and cause.kill:
            # Another announcement of the same failure: only the first one could record the node's earlier state.
            first = self.memory.slurm.unkilled
            if first is not None and is_recorded(before, self.memory.slurm):
                both = tuple({*first.processes, *processes})
                unkilled = replace(unkilled, first_at=first.first_at, processes=both, before=first.before)
            else:
                unkilled = replace(unkilled, before=None)
        watch = replace(self.memory.slurm, unkilled=unkilled)
        self.memory = expect_drain(replace(self.memory, slurm=watch), clock())
        log(f"Slurm cannot kill job {job}: {counted(len(processes), 'process is', 'processes are')} left")
        return {"processes": len(processes)}

    def end_dead_jobs(self) -> None:
        """Cancel the jobs whose slurmstepd the kernel killed because the job's memory stays full."""
        now = clock().steady
        if now - self._dead_looked < slurm_drains.DEAD_LOOK_S:
            return
        self._dead_looked = now
        dead = slurm_drains.find_dead_jobs(self.places.spool, self.slurm.name)
        self._dead = {job: self._dead.get(job, now + slurm_drains.DEAD_S) for job in dead}
        for job in [job for job, due in self._dead.items() if now >= due]:
            self._dead[job] = now + slurm_drains.DEAD_AGAIN_S
            if not (limit := slurm_drains.find_full_limit(job, self.places.cgroups)):
                continue
            text = slurm_drains.format_dead_reason(limit)
            try:
                cancelled = self.slurm.cancel(job, text)
            except InitError as error:
                log(f"job {job} is not cancelled: {error.why}")
                return
            self._dead[job] = now + slurm_drains.DEAD_OVER_S
            if cancelled:
                log(f"cancelled job {job}: {text}")
            if dead[job].alone:
                slurm_drains.end_processes(job, self.places.cgroups)

    def _wants_deep_checks(self) -> bool | None:
        """Decide if deep checks are wanted; None while unknown.

        Requires both the node as the pod found it, which the broker's own drains do not change, and the node as it is
        now, since it may have been resumed and have jobs.
        """
        if self.memory.node_at_start is None or not asks_for_deep(self.memory.node_at_start):
            return None if self.memory.node_at_start is None else False
        node = _ask(self.slurm.require_node)
        return None if isinstance(node, Failed) else asks_for_deep(node)

    def _stops_job(self, checks: list[str]) -> bool:
        """Tell if one of the checks has a problem for which the node is drained: the prolog then fails."""
        standing = self.memory.list_standing(clock())
        return self.memory.drained and any(check in standing for check in checks)

    def _remember(self, outcome: tuple[Memory, tuple[Log, ...]]) -> None:
        self.memory, logs = outcome
        for entry in logs:
            log(entry.text)

    def _check_resumed(self) -> None:
        """Ask slurmctld if a person has resumed the node, before a job is refused for the broker's drain."""
        try:
            node = self.slurm.node()
        except InitError as error:
            log(str(error))
            return
        if node is not None and not node.drained:
            self._remember(hold_resumed(self.memory, clock()))

    def wait_s(self) -> float:
        """Return the time until the next look is due."""
        now = clock()
        times = [at - now.steady for at in (self.memory.due, self.memory.recheck, self.memory.jobs_look) if at]
        return max(SOON_S, min([LOOK_S, *times]))

    def detect_change(self) -> bool:
        """Tell if the broker must read the verdicts again, and note the time of their directory.

        A rename in the directory changes its time. A deadline, such as that of a resumed check, needs no new verdict.
        """
        try:
            at = self.places.verdicts.stat().st_mtime_ns
        except OSError:
            at = 0
        changed, self._changed_at = at != self._changed_at, at
        return changed or is_restless(self.memory) or is_due(self.memory.jobs_look, clock())

    def _save(self) -> None:
        """Write the broker's state for people; nothing reads it back, and it may be lost."""
        now = clock()
        standing = self.memory.list_standing(now)
        problems = {check: seen.reason for check, seen in standing.items()}
        if self.memory.drained:
            problems["drained by the broker"] = reason(standing)
        black_box.see(black_box.changes(self._problems, problems), now.wall)
        self._problems = problems
        data = {
            "node": self.slurm.name,
            "drained": self.memory.drained,
            "said": self.memory.status_text,
            "standing": {check: asdict(seen) for check, seen in standing.items()},
            "held": self.memory.held,
            "reason": reason(standing) if standing else "",
            "at": now.wall,
        }
        with contextlib.suppress(OSError):
            # People search this file for text: keep its form.
            write_whole(self.places.broker_state, json.dumps(data).encode())

    def reload_policy(self) -> None:
        """Read the operator's policy, else the tree's; log an invalid file's error once."""
        own, refused = None, []
        try:
            own = load_broker_policy(self.places.policy)
        except InitError as error:
            refused.append(str(error))
        try:
            self.policy = own or read_broker_policy(self.places.scripts)
        except InitError as error:
            refused.append(str(error))  # the last valid policy stays
        before, self.refused = self.refused, "; ".join(refused)
        if self.refused not in ("", before):
            log(self.refused)


def _ask(ask: Callable[[], T]) -> T | Failed:
    try:
        return ask()
    except InitError as error:
        return Failed(str(error))


def log(text: str) -> None:
    print(f"broker: {text}", file=sys.stderr, flush=True)
