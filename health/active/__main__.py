"""Submit active checks to idle nodes: `python3 -I -m health.active`, a periodic service on the acting controller.

It runs as Slurm's own user, whose jobs alone the partition takes. Settings: MINIVM_ACTIVE_IDLE, MINIVM_ACTIVE_SHARE,
MINIVM_ACTIVE_ACCOUNT, MINIVM_ACTIVE_SWITCH_WEIGHT. On failure the exit code is 1 and the only line is the reason for
the pod's degraded state.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from gitsync import lease
from gitsync.errors import GitsyncError
from ground.files import remove_temporaries, write_if_possible, write_json
from health.active import metrics
from health.active.culprit import GroupTest, Part, PlacedMachine
from health.active.turn import (
    MEMORY,
    ActiveInputs,
    ActiveJob,
    ActiveNode,
    ActiveSettings,
    JobResult,
    Submission,
    Turn,
    complaint,
    decide,
    findings,
    is_at_fault,
    load_memory,
    save_memory,
)
from health.checks.active_checks import list_active_checks
from health.script import UNFIT
from init.errors import ConfigError, InitError
from init.fields import duration, number
from init.slurm import client
from init.slurm.node import Node, parse

PARTITION = "minivm-active"
REPORT = Path("/var/lib/minivm/active/report.json")
METRICS = Path("/run/minivm/metrics.d/slurm/active.prom")
SUBMIT_S = 60.0  # of a turn
PYTHON = "/opt/minivm/bin/python3"
WEIGHT = re.compile(r"[0-9]{1,9}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
# What the check's run writes into its job's AdminComment (health/active/run.py).
RATE = re.compile(r"minivm: rate ([0-9]{1,12}(?:\.[0-9])?) MB/s")
COMMENT = re.compile(r"active-check ([\w.-]+) suspects=([\w.,-]+) partners=([\w.,-]*)")
# An idle node has no other state than how it came to be.
HARMLESS = frozenset({"IDLE", "DYNAMIC_NORM", "DYNAMIC_FUTURE", "CLOUD"})
# A waiting job holds checks back if it starts this soon, or waits for less than an hour: slurmctld guesses starts by
# time limits, and a job that waits for ever must not end all checks.
SOON_S, FRESH_S = 300.0, 3600.0
ENDED = {
    "CD": JobResult.PASSED,
    **dict.fromkeys(("PR", "CA", "NF", "BF", "DL"), JobResult.CANCELLED),
    **dict.fromkeys(("F", "TO", "OOM"), JobResult.NONE),
}


def settings(env: Mapping[str, str]) -> ActiveSettings:
    idle_text, share_text = env.get("MINIVM_ACTIVE_IDLE", "600s"), env.get("MINIVM_ACTIVE_SHARE", "0.25")
    weight_text = env.get("MINIVM_ACTIVE_SWITCH_WEIGHT", "0")
    idle = duration(idle_text)
    try:
        share = float(share_text)
    except ValueError:
        share = math.nan
    for name, text, valid, expected in (
        ("MINIVM_ACTIVE_IDLE", idle_text, idle is not None, "a duration such as 600s"),
        ("MINIVM_ACTIVE_SHARE", share_text, 0 < share <= 1, "a share above 0 and at most 1"),
        (
            "MINIVM_ACTIVE_SWITCH_WEIGHT",
            weight_text,
            WEIGHT.fullmatch(weight_text),
            "a whole number from 0 to 999999999",
        ),
    ):
        if not valid:
            raise ConfigError("plan active checks", f"found {text!r}, expected {expected}", field=name)
    return ActiveSettings(idle or 0.0, share, int(weight_text))


def format_comment(submission: Submission) -> str:
    test = submission.test
    return f"active-check {submission.check} suspects={','.join(test.suspects)} partners={','.join(test.partners)}"


def parse_jobs(text: str, now: float) -> tuple[ActiveJob, ...]:
    """Parse squeue's lines ID|STATE|EXIT|SUBMITTED|ADMINCOMMENT|COMMENT|; a job that is no active check is skipped."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|")
        match = COMMENT.fullmatch(fields[5].strip()) if len(fields) >= 6 else None
        if match is None:
            continue
        job, state, code, submitted = (field.strip() for field in fields[:4])
        test = GroupTest(tuple(match[2].split(",")), tuple(name for name in match[3].split(",") if name))
        waits = max(0.001, now - _time(submitted)) if state == "PD" else 0.0
        rate = RATE.fullmatch(fields[4].strip())
        jobs.append(ActiveJob(job, match[1], test, _result(state, code), waits, float(rate[1]) if rate else 0.0))
    return tuple(jobs)


def _result(state: str, code: str) -> JobResult:
    if state == "F" and code == f"{UNFIT}:0":
        return JobResult.FAILED
    return ENDED.get(state, JobResult.IN_FLIGHT)


def _time(text: str) -> float:
    """Return Slurm's local time as seconds since 1970; 0 if it has none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def parse_node(node: Node, now: float) -> ActiveNode:
    shown = dict(node.shown)
    # "default:/:row-1/:row-1/r7,blocks:b1": the tree's switches from the root to the leaf.
    tree = next((part for part in shown.get("Topology", "").split(",") if part.startswith("default:")), "")
    is_idle = node.flags <= HARMLESS and "IDLE" in node.flags and node.state.rstrip("*~#!%$@^-") == node.state
    # Without a time the node counts as busy until now.
    since = _time(shown.get("LastBusyTime", "")) or now
    machine = PlacedMachine(node.name, tuple(tree.split(":")[1:]))
    weight = number(shown.get("Weight", ""))
    return ActiveNode(machine, is_idle and node.allocated == 0, since, 1 if weight is None else weight)


def build_job_command(submission: Submission) -> str:
    """Return the line of the batch script. Names are plain words, so the shell changes none of them."""
    test = submission.test
    for word in (submission.check, *test.machines):
        if not NAME.fullmatch(word):
            raise ConfigError("submit an active check", f"{word!r} is no plain name")
    run = [PYTHON, "-I", "-m", "health.active.run", submission.check]
    if submission.needs.nodes > 1:
        step = ["srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={test.suspects[0]}"]
        run = [*step, *run, f"--group={','.join(test.suspects)}", f"--partners={','.join(test.partners)}"]
    # No shell stays between Slurm and the check: the job ends at once when it makes room.
    return f"exec {' '.join(run)}"


def submit(submission: Submission, account: str, controller: str) -> None:
    machines = submission.test.machines
    command = [
        client.SBATCH, "--parsable", f"--partition={PARTITION}", "--exclusive", f"--nodes={len(machines)}",
        f"--nodelist={','.join(machines)}", "--ntasks-per-node=1", "--mem=0", "--no-requeue", "--chdir=/",
        "--output=/dev/null", f"--time={submission.needs.minutes}", f"--job-name=active-{submission.check}",
        f"--comment={format_comment(submission)}", *([f"--account={account}"] if account else []),
        f"--wrap={build_job_command(submission)}",
    ]  # fmt: skip
    client.run(command, controller, within=20.0)


def submit_all(submissions: Iterable[Submission], account: str, controller: str) -> str:
    """Submit within SUBMIT_S, the rest in the next turn; return the first refusal, which keeps no other test."""
    refused, until = "", time.monotonic() + SUBMIT_S
    for submission in submissions:
        if time.monotonic() > until:
            break
        try:
            submit(submission, account, controller)
        except (InitError, OSError) as error:
            refused = refused or explain(error, account, controller)
    return refused


def set_weights(weights: Mapping[str, int], controller: str) -> str:
    """Set the nodes' weights; return the first refusal. The next turn sees what is missing."""
    refused = ""
    for weight in sorted(set(weights.values())):
        names = ",".join(sorted(name for name, wanted in weights.items() if wanted == weight))
        try:
            client.run([client.SCONTROL, "update", f"nodename={names}", f"weight={weight}"], controller)
        except (InitError, OSError) as error:
            refused = refused or f"cannot set the weight of {names[:100]}: {error}"
    return refused


def explain(error: Exception, account: str, controller: str) -> str:
    """Return why slurmctld took no test: of a wrong account, with those that the user has."""
    output = error.output if isinstance(error, client.SlurmError) else ""
    # The second is the command filter's.
    if not any(words in output for words in ("Invalid account", "minivm: --account=")):
        return str(error)
    user = pwd.getpwuid(os.geteuid()).pw_name
    command = [client.SACCTMGR, "-nP", "show", "associations", "where", f"user={user}", "format=account"]
    try:
        accounts = sorted(set(client.run(command, controller).split()))
    except (InitError, OSError):
        return str(error)
    return str(explain_wrong_account(account, user, accounts))


def explain_wrong_account(account: str, user: str, accounts: Sequence[str]) -> ConfigError:
    reason = (
        f"found {account!r}, expected an account that has the user {user}, which is in {', '.join(accounts) or 'none'}"
    )
    add = f"sacctmgr add user {user} account={account or 'ACCOUNT'}"
    hint = f"set it to one of these, or run `{add}`" if accounts else f"run `{add}`"
    return ConfigError("submit active checks", reason, field="activeChecks.account", hint=hint)


def observe(env: Mapping[str, str], controller: str, now: float) -> ActiveInputs:
    with lease.hold() as held:
        declared, commit = list_active_checks(held.path), held.commit
    shape = "jobid:|,statecompact:|,exit_code:|,submittime:|,admin_comment:|,comment:|"
    # Another user's job may name the partition too, and carry any comment.
    user = pwd.getpwuid(os.geteuid()).pw_name
    own = client.run([client.SQUEUE, "--all", "--noheader", f"--user={user}", f"--partition={PARTITION}",
                      "--states=all", f"--Format={shape}"], controller)  # fmt: skip
    argv = [client.SQUEUE, "--all", "--noheader", "--states=PD", f"--Format={metrics.FORMAT}"]
    waiting = client.run(argv, controller).splitlines()
    text = client.run([client.SCONTROL, "--oneliner", "show", "node"], controller)
    nodes = [parse(line) for line in text.splitlines() if line.startswith("NodeName=")]
    inside = [node for node in nodes if PARTITION in dict(node.shown).get("Partitions", "").split(",")]
    return ActiveInputs(
        declared.checks,
        parse_jobs(own, now),
        tuple(parse_node(node, now) for node in inside),
        find_awaited(waiting, nodes, now),
        settings(env),
        commit,
        find_startable(waiting, nodes, now),
    )


def find_startable(lines: Iterable[str], nodes: Iterable[Node], now: float) -> Mapping[str, int]:
    """Count the jobs, from lines of metrics.FORMAT, that wait for nodes although idle ones fit."""
    idle: dict[metrics.IdleKind, set[str]] = {}
    for node in nodes:
        if parse_node(node, now).is_idle:
            shown = dict(node.shown)
            partitions = frozenset(shown.get("Partitions", "").split(",")) - {PARTITION, ""}
            features = frozenset(shown.get("ActiveFeatures", "").split(","))
            kind = metrics.IdleKind(partitions, features, shown.get("CfgTRES", ""))
            idle.setdefault(kind, set()).add(node.name)
    requests: Counter[metrics.JobRequest] = Counter()
    for parsed in map(metrics.parse_request, lines if idle else ()):
        if parsed and 0 < _time(parsed[1]) <= now - metrics.WAITED_S:
            requests[parsed[0]] += 1
    return metrics.count_startable(requests, idle)


def find_awaited(lines: Iterable[str], nodes: Iterable[Node], now: float) -> frozenset[str]:
    """Return the nodes of partitions whose jobs may start soon, from lines PARTITIONS|REASON|START|ELIGIBLE|..."""
    partitions: set[str] = set()
    for line in lines:
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 4 and _starts_soon(fields[1], fields[2], fields[3], now):
            partitions.update(fields[0].split(","))
    partitions.discard(PARTITION)
    return frozenset(
        node.name for node in nodes if partitions.intersection(dict(node.shown).get("Partitions", "").split(","))
    )


def _starts_soon(reason: str, start: str, eligible: str, now: float) -> bool:
    begins = _time(start)
    if begins < now - SOON_S:
        begins = 0.0  # an estimate of long ago, which backfill has not looked at again
    if reason == "BeginTime":
        return 0 < begins < now + SOON_S
    if reason not in metrics.WAITS_FOR_NODES:
        return False
    return 0 < begins < now + SOON_S or now - (_time(eligible) or now) < FRESH_S


def report(turn: Turn) -> dict[str, object]:
    """Describe the machines and switches to blame, and each check's machines, for people and metrics."""
    checks = {}
    for name, state in sorted(turn.memory.checks.items()):
        results = [item for item in state.machines.values() if item.at]
        checks[name] = {
            "machines": len(results),
            "oldest": min((item.at for item in results), default=0.0),
            "at_fault": is_at_fault(state),
            "culprits": [{"part": item.part, "name": item.name, "failures": item.failures} for item in findings(state)],
        }
    return {"checks": checks}


def sentence(turn: Turn) -> str:
    """Return the reason for the pod's degraded state; "" if no check blames anything."""
    words = []
    for name, state in sorted(turn.memory.checks.items()):
        if text := complaint(name, state):
            words.append(text)
        for item in findings(state)[:5]:
            part = "the leaf switch " if item.part is Part.LEAF else ""
            words.append(f"active check {name}: {part}{item.name} failed {item.failures} of {item.failures} tests")
    if penalties := turn.memory.penalties:
        words.append(f"Slurm chooses {len(penalties)} nodes of blamed switches last")
    return "; ".join(words)[:400]


def main() -> int:
    controller, now = client.address(os.environ), time.time()
    try:
        inputs = observe(os.environ, controller, now)
        turn = decide(load_memory(MEMORY), inputs, now)
        # The jobs' comments prove what was submitted, so the order of these steps does not matter to a kill.
        save_memory(MEMORY, turn.memory)
        remove_temporaries(REPORT)
        write_json(REPORT, report(turn))
        write_if_possible(METRICS, metrics.render(turn.memory, inputs.startable))
        if turn.cancel:
            client.run([client.SCANCEL, *turn.cancel], controller)
        unweighed = set_weights(turn.weights, controller)
        refused = submit_all(turn.submit, os.environ.get("MINIVM_ACTIVE_ACCOUNT", ""), controller)
    except (InitError, GitsyncError, OSError) as error:
        print(error)
        return 1
    if text := "; ".join(filter(None, (sentence(turn), unweighed, refused))):
        print(text)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
