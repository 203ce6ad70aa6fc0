"""Run one active check inside its job, on the node: `python3 -I -m health.active.run CHECK [--group A,B]`.

The exit code is the result that the controller reads from the job: 0 passed, 80 (MINIVM_UNFIT) failed, 1 not known.
With a group, this node is its first machine and measures towards the others. A result that is about this node alone is
also kept in a file, which the health check `active_checks` judges. A job that is killed leaves the previous file.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gitsync import lease
from gitsync.errors import GitsyncError
from ground.commands import become_subreaper
from ground.files import read_json, remove_temporaries, write_json
from health.api import CheckModule, Result
from health.checks.active_checks import ACTIVE, DIRECTORY
from health.checks.collect import collect
from health.checks.judge import Judged, Setting, judge
from health.checks.load import load_checks, load_limits
from health.places import boot_id
from health.script import UNFIT
from init.errors import InitError
from init.slurm import client

# What a check's programs may know of their job: enough to start a step in it.
OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME")
LATER_S = 60.0
# An srun that is killed cannot hear of its step's end: the step's node tries to tell it for seconds, and the user's job
# waits. An srun that is told to end takes 0.2 s.
END_S = 1.0


@dataclass(frozen=True, slots=True)
class ActiveRecord:
    """Last result of one active check on this node."""

    check: str
    result: str = Result.UNKNOWN.value
    reason: str = ""
    at: float = 0.0
    # In a row.
    failures: int = 0
    commit: str = ""
    job: str = ""
    # How long the result counts.
    period_s: float = 86400.0
    # What the check remembers.
    state: Mapping[str, Any] = field(default_factory=dict)


def read_record(check: str, directory: Path = DIRECTORY) -> ActiveRecord:
    """Read the last result; an absent or damaged file is no result."""
    data = read_json(directory / f"{check}.json")
    try:
        state, at, failures = data.get("state", {}), float(data["at"]), int(data["failures"])
        period_s = float(data.get("period_s", 86400.0))
        if not isinstance(state, dict) or not math.isfinite(at + period_s) or failures < 0:
            return ActiveRecord(check)
        texts = {key: str(data.get(key, "")) for key in ("result", "reason", "commit", "job")}
        return ActiveRecord(check, at=at, failures=failures, period_s=period_s, state=state, **texts)
    except (KeyError, TypeError, ValueError, OverflowError):
        return ActiveRecord(check)


def record_run(before: ActiveRecord, judged: Judged, job: str, period_s: float) -> ActiveRecord:
    """Return the record after a run. What could not be measured neither counts nor clears a failure."""
    verdict = judged.verdict
    counts = {Result.OK: 0, Result.PROBLEM: before.failures + 1, Result.UNKNOWN: before.failures}
    return ActiveRecord(
        verdict.check, verdict.result.value, verdict.reason, verdict.at, counts[verdict.result], verdict.commit, job,
        period_s, judged.state,
    )  # fmt: skip


def save(record: ActiveRecord, directory: Path = DIRECTORY) -> None:
    file = directory / f"{record.check}.json"
    # One active check at a time runs on a node.
    remove_temporaries(file)
    write_json(file, asdict(record))


def run_check(
    module: CheckModule, tree: Path, commit: str, before: ActiveRecord, environment: Mapping[str, str]
) -> Judged:
    captures = collect(module.CHECK.sources, environment, at_once=1, grace_s=END_S)
    setting = Setting(commit, boot_id(), time.time(), {})
    return judge(module, captures, lambda name: load_limits(tree, name), setting, before.state)


@contextlib.contextmanager
def wait_for_children() -> Iterator[None]:
    """End at SIGTERM only after all processes of the check.

    Where one of them outlives the job's first process, Slurm looks again after a second, and the user's job waits.
    """

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    become_subreaper()
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        end_children()
        raise


def end_children() -> None:
    """End what `collect` has not: its orphans end alone, but it does not know a program whose start was interrupted."""
    listed, until = Path(f"/proc/self/task/{os.getpid()}/children"), time.monotonic() + END_S
    ended: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            is_late = time.monotonic() > until
            for pid in map(int, listed.read_text().split()):
                if is_late or pid not in ended:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
                ended.add(pid)
            time.sleep(0.01)


def main(arguments: list[str]) -> int:
    with wait_for_children():
        return run(arguments)


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="health.active.run")
    parser.add_argument("check")
    parser.add_argument("--group", default="", help="the machines under test, this node first")
    parser.add_argument("--partners", default="", help="machines that are known to be good")
    parser.add_argument("--passed", default="", help="record that the check passed here, with this reason")
    parser.add_argument("--period", type=float, default=86400.0, help="how long that pass counts, in seconds")
    parser.add_argument("--on", default="", help="measure on this node alone: srun may start a step on another one")
    parser.add_argument("--keep-nothing", action="store_true", help="record no result on any node")
    options = parser.parse_args(arguments)
    job = os.environ.get("SLURM_JOB_ID", "")
    node = os.environ.get("SLURMD_NODENAME", "")
    if options.on and node != options.on:
        print(f"{options.check}: unknown: srun started the test on {node} and not on {options.on}", flush=True)
        return 1
    before = read_record(options.check)
    if options.passed:
        reason = options.passed[:300]
        # Another node measured: an earlier rate of this one is older than the result.
        state = {key: value for key, value in before.state.items() if key != "last_mbs"}
        save(replace(before, result=Result.OK.value, reason=reason, at=time.time(), failures=0, job=job,
                     period_s=options.period, state=state))  # fmt: skip
        return 0
    # In a group srun asks: it starts no step in a job that was ended.
    if job and not options.group and not options.keep_nothing and is_ending(job):
        print(f"{options.check}: unknown: job {job} was ended before it began", flush=True)
        return 128 + signal.SIGTERM
    suspects = [name for name in options.group.split(",") if name]
    peers = [*suspects[1:], *(name for name in options.partners.split(",") if name)]
    environment = {key: os.environ[key] for key in OF_THE_JOB if key in os.environ}
    try:
        with lease.hold() as held:
            loaded = load_checks(held.path, [options.check], ACTIVE)
            if options.check not in loaded.checks:
                reason = loaded.broken.get(options.check, f"commit {held.commit} has no {ACTIVE}/{options.check}.py")
                print(f"cannot run an active check: {reason}", file=sys.stderr)
                return 1
            module = loaded.checks[options.check]
            judged = run_check(module, held.path, held.commit, before, {**environment, "MINIVM_PEERS": ",".join(peers)})
    except GitsyncError as error:
        print(error, file=sys.stderr)
        return 1
    passed = judged.verdict.result is Result.OK
    if options.keep_nothing:
        pass
    elif passed or len(suspects) <= 1:
        save(record_run(before, judged, job, module.CHECK.period_s))
    rate = judged.state.get("last_mbs")
    if judged.verdict.result is not Result.UNKNOWN and isinstance(rate, int | float) and not options.keep_nothing:
        _tell_rate(job, rate)
    if passed and peers and not options.keep_nothing:
        _record_pass(options.check, peers, judged.verdict.reason, module.CHECK.period_s)
    print(f"{options.check}: {judged.verdict.result}: {judged.verdict.reason}", flush=True)
    return {Result.OK: 0, Result.PROBLEM: UNFIT, Result.UNKNOWN: 1}[judged.verdict.result]


def is_ending(job: str) -> bool:
    """Tell if Slurm has ended the job: a SIGTERM that is sent before the job's first process exists is lost."""
    try:
        command = [client.SQUEUE, "--local", "--noheader", "--states=all", f"--jobs={job}", "--format=%t"]
        return client.run(command, "slurmctld").strip() == "CG"
    except InitError:
        return False


def _tell_rate(job: str, rate: float) -> None:
    """Write the rate into the job's AdminComment, where the planner reads it; without it `minivm active` lacks it."""
    command = ["scontrol", "update", f"jobid={job}", f"admincomment=minivm: rate {rate:.1f} MB/s"]
    _run_in_job(command, f"tell the rate of {rate:.1f} MB/s")


def _record_pass(check: str, peers: list[str], reason: str, period_s: float) -> None:
    """Record the pass on the other nodes too; without it they only show an older result."""
    command = [
        "srun", "--overlap", "--mpi=none", f"--nodes={len(peers)}", f"--ntasks={len(peers)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(peers)}", sys.executable, "-I", "-m", "health.active.run", check,
        f"--passed={reason or 'passed'}", f"--period={period_s:g}",
    ]  # fmt: skip
    _run_in_job(command, f"record the pass on {','.join(peers)}")


def _run_in_job(command: list[str], what: str) -> None:
    """Run one of Slurm's clients with what it may know of the job; the check's result does not depend on it."""
    environment = {key: os.environ[key] for key in ("PATH", *OF_THE_JOB) if key in os.environ}
    try:
        subprocess.run(command, env=environment, timeout=LATER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"cannot {what}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
