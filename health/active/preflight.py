"""Test the nodes of a job before its work: `minivm preflight || exit`, a line of the job's batch script.

Runs as the job's user in the job's own allocation: TCP between pairs of its nodes, by the active check `tcp`; a failed
pair is bisected with good nodes. If nodes are bad, the job is requeued without them and the command ends with 1.
Otherwise it ends with 0, also where the test has no clear result: it keeps no job from running for a fault of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from health.active.culprit import GroupResult, Part, diagnose
from health.active.groups import GroupTest, PlacedMachine, sweep
from health.script import UNFIT

CHECK = "tcp"
SECONDS = 120.0
# Tests at once, each with an srun on the first node.
AT_ONCE = 128
# Requeues of a job after which it runs whatever its nodes are.
MOST_RESTARTS = 3
# More bad nodes than this share of the job's: the check is at fault.
MOST = 0.5
CLIENT_S, PENDING_S = 20.0, 15.0
# What an srun inside the job needs; the job's own options for srun must not change the test.
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


def run_step(node: str, within_s: float, *command: str) -> subprocess.CompletedProcess[bytes]:
    srun = [
        "srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--chdir=/",
        "--input=none", "--quiet", sys.executable, "-I", "-m", *command,
    ]  # fmt: skip
    environment = {key: os.environ[key] for key in OF_THE_JOB if key in os.environ}
    return subprocess.run(srun, env=environment, capture_output=True, timeout=within_s, check=False)


def run_test(test: GroupTest, within_s: float) -> GroupOutcome:
    machines = (f"--group={','.join(test.suspects)}", f"--partners={','.join(test.partners)}")
    try:
        done = run_step(test.suspects[0], within_s, "health.active.run", CHECK, *machines, "--keep-nothing")
    except subprocess.TimeoutExpired:
        return GroupOutcome(None, f"no result within {within_s:.0f} s")
    except OSError as error:
        return GroupOutcome(None, f"cannot run srun: {error}")
    said = plain(done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace"))
    return GroupOutcome({0: True, UNFIT: False}.get(done.returncode), said)


def client(*command: str) -> str:
    """Return the output of a client of Slurm; OSError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, check=False, errors="replace")
    if done.returncode:
        raise OSError(plain(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def name_job(environment: Mapping[str, str]) -> str:
    """Return the job's name for scontrol: the number of an array's task may be that of the whole array."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def requeue_without(job: str, bad: Sequence[str]) -> None:
    """Requeue the job and exclude the nodes, as a step of the job; OSError if slurmctld refuses.

    The job cannot start again while this process lives on its node, so the exclusion comes in time. If the process is
    killed in between, the next start tests the same nodes again.
    """
    # Slurm ends the job's processes by SIGTERM, and kills them KillWait (30 s) later. scontrol inherits this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shown = client("scontrol", "--oneliner", "show", "job", job)
    before = re.search(r" ExcNodeList=([^\s()]+)", shown)
    excluded = ",".join(filter(None, (before[1] if before else "", *bad)))
    client("scontrol", "requeue", job)
    until = time.monotonic() + PENDING_S
    while True:
        try:
            client("scontrol", "update", f"jobid={job}", f"excnodelist={excluded}")
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


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
        nodes = client("scontrol", "show", "hostnames", listed).split()
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"not tested: {error}")
        return 0
    if len(nodes) < max(2, options.nodes) or not all(map(NAME.fullmatch, nodes)):
        return 0
    start = time.monotonic()

    def left() -> float:
        return SECONDS - (time.monotonic() - start)

    def run_all(tests: Sequence[GroupTest]) -> Sequence[GroupOutcome]:
        with ThreadPoolExecutor(min(AT_ONCE, len(tests))) as pool:
            return list(pool.map(lambda test: run_test(test, max(1.0, left())), tests))

    outcome = examine(nodes, run_all, lambda: left() > 0)
    cost = f"{time.monotonic() - start:.0f} s, {outcome.tests} tests"
    return act(nodes, outcome, cost)


def act(nodes: Sequence[str], outcome: Outcome, cost: str) -> int:
    if outcome.unclear:
        say(f"no clear result, so the job runs: {outcome.unclear} ({cost})")
        return 0
    if not outcome.bad:
        say(f"{len(nodes)} nodes passed ({cost})")
        return 0
    bad = "; ".join(f"node {name}: {reason}" for name, reason in sorted(outcome.bad.items()))
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    if restarts.isdigit() and int(restarts) >= MOST_RESTARTS:
        say(f"{bad}; the job was requeued {restarts} times already, so it runs here ({cost})")
        return 0
    say(f"{bad}; the job is requeued without ({cost})")
    names = ",".join(sorted(outcome.bad))
    here = os.environ.get("SLURMD_NODENAME") or nodes[0]
    try:
        done = run_step(here, CLIENT_S * 3, "health.active.preflight", f"--requeue-without={names}")
        reason = plain(done.stdout.decode(errors="replace")) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        say(f"cannot requeue the job ({reason}): submit it again with --exclude={names}")
    return 1


def requeue_step(job: str, bad: Sequence[str]) -> int:
    try:
        requeue_without(job, bad)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
