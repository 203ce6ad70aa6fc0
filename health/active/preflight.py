"""Test the nodes of a job before its work: `minivm preflight || [ $? -ne 86 ] || exit 1` in its batch script.

Runs as the job's user in the job's own allocation: TCP between pairs of its nodes, by the active check `tcp`; a failed
pair is bisected with good nodes. If nodes are bad and the job can run on others, it is requeued without them and the
command ends with 86. Any other exit code means: run the job. The test keeps no job from running for a fault of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ground.errors import counted
from health.active.culprit import GroupResult, GroupTest, Part, PlacedMachine, diagnose, sweep
from health.script import UNFIT

CHECK = "tcp"
SECONDS = 120.0
# Tests at once, each with an srun in the memory of the batch step.
AT_ONCE = 16
# After so many requeues a job runs on any nodes.
MOST_RESTARTS = 3
# Exit code of a requeued job's test. No shell, signal or traceback ends with it, nor an image without this command.
REQUEUED = 86
# More bad nodes than this share of the job's: the check is at fault.
MOST = 0.5
CLIENT_S, PENDING_S = 20.0, 15.0
# What the step says after slurmctld has done it.
DID_REQUEUE, DID_EXCLUDE = "requeued", "excluded"
# States of sinfo in which a node can run a job, now or after the job that it has; flags are cut off, but for `*`.
USABLE = frozenset({"allocated", "completing", "idle", "mixed", "planned"})
# Nodes of one kind differ by so much in the memory that they have for jobs.
LEAST_MEMORY = 0.9
# What a client of Slurm needs inside the job; the job's own options for srun must not change the test.
OF_THE_JOB = (
    "PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
)  # fmt: skip
JOB = re.compile(r"[0-9]+(_[0-9]+)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Result of one group test; None: none."""

    passed: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    # Bad nodes with the reason of a failed test.
    bad: Mapping[str, str]
    # Why there is no clear result; "" if there is one.
    unclear: str = ""
    tests: int = 0


def examine(
    nodes: Sequence[str], test: Callable[[Sequence[GroupTest]], Sequence[GroupOutcome]], within: Callable[[], bool]
) -> Outcome:
    """Test all nodes in pairs and bisect what fails, while there is time."""
    machines = [PlacedMachine(name) for name in nodes]
    groups = sweep(machines, 0)
    results: list[GroupResult] = []
    reasons: dict[str, str] = {}
    tests, silent = 0, 0
    while (diagnosis := diagnose(machines, groups, results)).wanted:
        if not within():
            return Outcome({}, "the time is up", tests)
        tested = test(diagnosis.wanted)
        tests += len(tested)
        for group, item in zip(diagnosis.wanted, tested, strict=True):
            if item.passed is not None:
                results.append(GroupResult(group, item.passed))
            if item.passed is False:
                reasons.update(dict.fromkeys(group.suspects, item.reason))
        silent = silent + 1 if any(item.passed is None for item in tested) else 0
        if silent > 1:
            reason = next((item.reason for item in tested if item.passed is None), "")
            return Outcome({}, f"a test gave no result: {reason}", tests)
    bad = {item.name: reasons.get(item.name, "") for item in diagnosis.culprits if item.part is Part.MACHINE}
    if len(bad) > MOST * len(nodes):
        return Outcome(
            {}, f"{len(bad)} of {len(nodes)} nodes fail, which is the check's fault rather than theirs", tests
        )
    if diagnosis.undecided and not bad:
        names = ", ".join(diagnosis.undecided[:5])
        return Outcome({}, f"{names}: no good node is left to test with", tests)
    return Outcome(bad, tests=tests)


def plain(text: str) -> str:
    """Return a program's last line as short, printable text."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(char if char.isprintable() else "?" for char in (lines[-1] if lines else "")[:200]).strip()


def pick_environment() -> dict[str, str]:
    return {key: os.environ[key] for key in OF_THE_JOB if key in os.environ}


def run_step(node: str, within_s: float, *command: str) -> subprocess.CompletedProcess[bytes]:
    srun = [
        "srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--chdir=/",
        "--input=none", "--quiet", sys.executable, "-I", "-m", *command,
    ]  # fmt: skip
    return subprocess.run(srun, env=pick_environment(), capture_output=True, timeout=within_s, check=False)


def run_test(test: GroupTest, within_s: float) -> GroupOutcome:
    first = test.suspects[0]
    machines = (f"--on={first}", f"--group={','.join(test.suspects)}", f"--partners={','.join(test.partners)}")
    try:
        done = run_step(first, within_s, "health.active.run", CHECK, *machines, "--keep-nothing")
    except subprocess.TimeoutExpired:
        return GroupOutcome(None, f"no result within {within_s:.0f} s")
    except OSError as error:
        return GroupOutcome(None, f"cannot run srun: {error}")
    message = plain(done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace"))
    return GroupOutcome({0: True, UNFIT: False}.get(done.returncode), message)


def client(*command: str) -> str:
    """Return the output of a client of Slurm; OSError if it fails."""
    try:
        done = subprocess.run(
            command, env=pick_environment(), capture_output=True, text=True, timeout=CLIENT_S, check=False,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} does not answer within {CLIENT_S:.0f} s") from None
    if done.returncode:
        raise OSError(plain(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def name_job(environment: Mapping[str, str]) -> str:
    """Return the job's name for scontrol: the number of an array's task may be that of the whole array."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record that slurmctld has of the running job. Lists of nodes are in Slurm's short form."""

    state: str
    restarts: int
    nodes: int
    partition: str
    required: str
    excluded: str
    reservation: str
    # Every feature that its --constraint names, also a negated one.
    features: frozenset[str]
    has_gres: bool


def read_job(job: str) -> JobRecord:
    """Ask slurmctld about the job; OSError if it does not answer, or not as expected."""
    shown = " " + client("scontrol", "--oneliner", "show", "job", job)

    def field(name: str) -> str:
        value = re.search(rf" {name}=(\S*)", shown)
        return value[1] if value and value[1] != "(null)" else ""

    # A pending job of `--nodes=2-4` has both numbers.
    restarts, nodes = (re.match("[0-9]+", field(name)) for name in ("Restarts", "NumNodes"))
    if not restarts or not nodes:
        raise OSError("scontrol show job says no NumNodes or Restarts")
    return JobRecord(
        field("JobState"), int(restarts[0]), int(nodes[0]), field("Partition"), field("ReqNodeList"),
        field("ExcNodeList"), field("Reservation"), frozenset(re.findall(r"[^&|()\[\]*,]+", field("Features"))),
        bool(re.search(r" TresPer\w+=\S*gres", shown)),
    )  # fmt: skip


def expand(names: str) -> list[str]:
    return client("scontrol", "show", "hostnames", names).split() if names else []


@dataclass(frozen=True, slots=True)
class NodeKind:
    """One node as sinfo shows it."""

    state: str
    cpus: int
    memory: int
    features: frozenset[str]
    gres: str


def read_partition(name: str) -> dict[str, NodeKind]:
    """Ask slurmctld about the partition's nodes; OSError if it shows none."""
    # sinfo shows a hidden partition with --all, and refuses that together with --partition.
    shown = client("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%T|%c|%m|%f|%G")
    rows: dict[str, NodeKind] = {}
    for line in shown.splitlines():
        partition, node, state, cpus, memory, features, gres = (line.strip().split("|", 6) + [""] * 7)[:7]
        if partition == name and cpus.isdigit() and memory.isdigit():
            gres = re.sub(r"\([^)]*\)", "", gres)
            rows[node] = NodeKind(state, int(cpus), int(memory), frozenset(features.split(",")), gres)
    if not rows:
        raise OSError(f"sinfo shows no node of partition {name}")
    return rows


def list_usable(job: JobRecord, nodes: Sequence[str]) -> set[str]:
    """Return the partition's nodes that can run the job: in use or free, and of a kind that the job has now.

    Rather too few than too many: a job that is not requeued runs, one that fits nowhere waits for ever.
    """
    rows = read_partition(job.partition)
    own = [rows[name] for name in nodes if name in rows]
    if not own:
        return set()
    cpus, memory = min(row.cpus for row in own), LEAST_MEMORY * min(row.memory for row in own)
    kinds = {(row.features & job.features, row.gres if job.has_gres else "") for row in own}
    reserved: set[str] = set()
    if job.reservation:
        shown = client("scontrol", "--oneliner", "show", "reservation", job.reservation)
        listed = re.search(r" Nodes=([^\s()]+)", shown)
        reserved = set(expand(listed[1] if listed else ""))

    def is_usable(name: str, row: NodeKind) -> bool:
        state = row.state.rstrip("~#!%$@^-+")
        if job.reservation and name not in reserved:
            return False
        if state not in USABLE and not (job.reservation and state == "reserved"):
            return False
        fits = row.cpus >= cpus and row.memory >= memory
        return fits and any(row.features >= features and gres in ("", row.gres) for features, gres in kinds)

    return {name for name, row in rows.items() if is_usable(name, row)}


def find_obstacle(job: JobRecord, nodes: Sequence[str], bad: Collection[str]) -> str:
    """Return why the job could not start without the bad nodes; "" if it could. OSError if Slurm does not tell."""
    required = sorted(set(bad).intersection(expand(job.required)))
    if required:
        return f"its --nodelist requires {','.join(required)}: submit it again without"
    usable = list_usable(job, nodes) - set(bad) - set(expand(job.excluded))
    if len(usable) >= job.nodes:
        return ""
    return (
        f"only {len(usable)} other nodes of partition {job.partition} can run it, and it needs {job.nodes}: "
        f"tell the administrators, or submit it again with fewer nodes and --exclude={','.join(sorted(bad))}"
    )


def requeue_step(job: str, bad: Sequence[str]) -> int:
    """Requeue the job and exclude the nodes, as a step of the job; print a word after each when slurmctld has done it.

    The job cannot start again while this process lives on its node, so the exclusion comes in time. If the process is
    killed in between, the next start tests the same nodes again.
    """
    # Slurm ends the job's processes by SIGTERM, and kills them KillWait (30 s) later. scontrol inherits this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        excluded = ",".join(filter(None, (read_job(job).excluded, *bad)))
        client("scontrol", "requeue", job)
    except OSError as error:
        tell(str(error))
        return 1
    tell(DID_REQUEUE)
    until = time.monotonic() + PENDING_S
    while True:
        try:
            client("scontrol", "update", f"jobid={job}", f"excnodelist={excluded}")
        except OSError as error:
            if time.monotonic() > until:
                tell(f"cannot exclude: {error}")
                return 1
            time.sleep(0.2)
        else:
            tell(DID_EXCLUDE)
            return 0


def tell(line: str) -> None:
    """Print for the process that started this step. The requeue ends srun, and then nothing reads this."""
    with suppress(OSError):
        print(line, flush=True)


def requeue(job: str, before: JobRecord, node: str, bad: Sequence[str]) -> tuple[bool, str]:
    """Requeue the job by a step on the node; return if slurmctld has done so, and what its user should know.

    The requeue ends this process too, soon after: each outcome that is not certain is one where the process lives on.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        done = run_step(node, CLIENT_S * 3, "health.active.preflight", f"--requeue-without={','.join(bad)}")
        output, errors = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
    except subprocess.TimeoutExpired:
        output, errors = "", f"no answer within {CLIENT_S * 3:.0f} s"
    except OSError as error:
        output, errors = "", f"cannot run srun: {error}"
    lines = output.splitlines()
    if DID_EXCLUDE in lines:
        return True, f" without {','.join(bad)}"
    if DID_REQUEUE in lines:
        reason = plain(output)
        return True, f"; {reason}" if reason != DID_REQUEUE else ""
    reason = plain(output) or plain(errors) or "the step says nothing"
    try:
        now = read_job(job)
    except OSError as error:
        return False, f"{reason}; {error}"
    if now.restarts > before.restarts or now.state == "PENDING":
        return True, ""
    return False, reason


def say(text: str) -> None:
    print(f"minivm preflight: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="minivm preflight", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requeue-without", default="", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="test only jobs of so many nodes; default: 2")
    options = parser.parse_args(arguments)
    job, listed = name_job(os.environ), os.environ.get("SLURM_JOB_NODELIST", "")
    if not JOB.fullmatch(job) or not listed:
        print("minivm preflight: runs inside a job only: put it into the batch script", file=sys.stderr)
        return 2
    if options.requeue_without:
        return requeue_step(job, options.requeue_without.split(","))
    if "SLURM_HET_SIZE" in os.environ:
        say("not tested: a heterogeneous job cannot be requeued by its components")
        return 0
    try:
        nodes = expand(listed)
    except OSError as error:
        say(f"not tested: {error}")
        return 0
    if len(nodes) < max(2, options.nodes) or not all(map(NAME.fullmatch, nodes)):
        return 0
    start = time.monotonic()

    def left() -> float:
        return SECONDS - (time.monotonic() - start)

    def run_in_time(test: GroupTest) -> GroupOutcome:
        remaining = left()
        return run_test(test, max(1.0, remaining)) if remaining > 0 else GroupOutcome(None, "the time is up")

    def run_all(tests: Sequence[GroupTest]) -> Sequence[GroupOutcome]:
        with ThreadPoolExecutor(min(AT_ONCE, len(tests))) as pool:
            return list(pool.map(run_in_time, tests))

    outcome = examine(nodes, run_all, lambda: left() > 0)
    cost = f"{time.monotonic() - start:.0f} s, {counted(outcome.tests, 'test')}"
    return act(nodes, outcome, cost)


def act(nodes: Sequence[str], outcome: Outcome, cost: str) -> int:
    if outcome.unclear:
        say(f"no clear result, so the job runs: {outcome.unclear} ({cost})")
        return 0
    if not outcome.bad:
        say(f"{counted(len(nodes), 'node')} passed ({cost})")
        return 0
    bad = "; ".join(f"node {name}: {reason}" for name, reason in sorted(outcome.bad.items()))
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    if restarts.isdigit() and int(restarts) >= MOST_RESTARTS:
        say(f"{bad}; the job was requeued {restarts} times already, so it runs here ({cost})")
        return 0
    job, names = name_job(os.environ), sorted(outcome.bad)
    try:
        record = read_job(job)
        obstacle = find_obstacle(record, nodes, names)
    except OSError as error:
        say(f"{bad}; cannot tell if other nodes can run it, so it runs here: {error} ({cost})")
        return 0
    if obstacle:
        say(f"{bad}; the job still runs here: {obstacle} ({cost})")
        return 0
    say(f"{bad}; asks slurmctld to requeue the job without ({cost})")
    is_requeued, detail = requeue(job, record, os.environ.get("SLURMD_NODENAME") or nodes[0], names)
    if is_requeued:
        say(f"the job is requeued{detail}")
        return REQUEUED
    advice = f"to run it on other nodes, submit it again with --exclude={','.join(names)}"
    say(f"it is not requeued and runs here: {detail}; {advice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
