"""Check that Slurm answers users' requests: a periodic check that the pod's readiness waits for.

Exit code 1, and the reason as the only line. On the controller and on login pods an unprivileged user lists the
partitions, which needs Slurm's authentication and slurmctld's locks. A worker asks its own slurmd when slurmctld last
contacted it, and asks slurmctld itself only when that is long ago: thousands of workers add no load. One failure in a
row changes nothing (`Memory`). A daemon that stays silent is restarted: jobs run on meanwhile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import datetime
from enum import Enum
from pathlib import Path

from ground.commands import ran
from ground.files import read_json, write_json
from init.errors import InitError
from init.places import pod_name
from init.pod import handover
from init.pod.addresses import host_and_port
from init.pod.client import Client
from init.pod.connections import crowd_at
from init.pod.helper import service
from init.records import fields, record, replace
from init.slurm import client
from init.slurm.node import unproven
from init.slurm.proof import WORKER

FILE = Path("/run/minivm/serving.json")
USER = "nobody"
DEADLINE_S = 5.0
FAILURES = 2  # in a row, before the pod is not ready
# A silent daemon is restarted after this time, and not again for the second. One that has just started may be busy.
SILENT_S, REST_S, YOUNG_S = 120.0, 1800.0, 300.0
# slurmctld contacts each slurmd every 2/3 of SlurmdTimeout. After HEARD_S without contact a worker asks slurmctld, and
# after a failure not sooner than ASK_AGAIN_S.
HEARD_S, ASK_AGAIN_S = 240.0, 90.0


class Fault(Enum):
    NONE = "none"
    SILENT = "silent"  # no answer in time: a restart may help
    REFUSED = "refused"  # an invalid answer: a restart does not help


@record(frozen=True, slots=True)
class AnswerCheck:
    fault: Fault = Fault.NONE
    reason: str = ""


@record(frozen=True, slots=True)
class CheckHistory:
    """State of this check between runs. Times are monotonic."""

    failures: int = 0
    silent_since: float = 0.0  # 0: it answers
    restarted: float = 0.0
    asked: float = 0.0
    proven: float = 0.0
    reason: str = ""


def judge(before: CheckHistory, finding: AnswerCheck, now: float) -> tuple[CheckHistory, str, bool]:
    """Return the new memory, the reason why the pod is not ready (or ""), and whether to restart the daemon."""
    if finding.fault is Fault.NONE:
        return replace(before, failures=0, silent_since=0.0, reason=""), "", False
    silent = (before.silent_since or now) if finding.fault is Fault.SILENT else 0.0
    after = replace(before, failures=before.failures + 1, silent_since=silent, reason=finding.reason)
    rested = not before.restarted or now - before.restarted >= REST_S
    restart = bool(silent) and now - silent >= SILENT_S and rested
    return after, finding.reason if after.failures >= FAILURES else "", restart


def ask_as_user(controller: str, port: int) -> AnswerCheck:
    """Ask as `sinfo` does: this needs authentication and slurmctld's lock on its partitions."""
    command = [client.SCONTROL, "--oneliner", "show", "partition"]
    try:
        done = ran(command, within=DEADLINE_S, env=client.environment(controller), user=USER, group="nogroup",
                   extra_groups=[])  # fmt: skip
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return AnswerCheck()
    complaint = client.judge(done.stderr or done.stdout, controller) if done is not None else ""
    if done is not None and client.rejected(done.stderr):
        return AnswerCheck(Fault.REFUSED, complaint)
    reason = f"slurmctld does not answer authenticated requests within {DEADLINE_S:g} s"
    if complaint:
        reason = f"slurmctld does not answer authenticated requests: {complaint}"
    crowd = crowd_at(port)
    return AnswerCheck(Fault.SILENT, f"{reason}; {crowd}" if crowd else reason)


def heard(text: str, now: float) -> float:
    """Return the seconds since slurmctld's last contact or slurmd's start; inf: unknown.

    The text is that of `scontrol show slurmd`.
    """
    moments = re.findall(r"^(?:Last slurmctld msg time|Boot time)\s*=\s*(\d\S+)", text, re.MULTILINE)
    return min((now - datetime.fromisoformat(moment).timestamp() for moment in moments), default=float("inf"))


def ask_as_worker(controller: str, memory: CheckHistory, now: float) -> tuple[CheckHistory, AnswerCheck]:
    try:
        done = ran([client.SCONTROL, "show", "slurmd"], within=DEADLINE_S, env=client.environment(controller))
    except subprocess.TimeoutExpired:
        return memory, AnswerCheck(Fault.SILENT, f"slurmd of this pod does not answer within {DEADLINE_S:g} s")
    if done.returncode:
        return memory, AnswerCheck(Fault.SILENT, "slurmd of this pod does not answer")
    if heard(done.stdout, time.time()) < HEARD_S or (now - memory.proven < HEARD_S and memory.proven):
        return memory, AnswerCheck()
    if memory.failures and now - memory.asked < ASK_AGAIN_S:
        return memory, AnswerCheck(Fault.REFUSED, memory.reason)
    memory = replace(memory, asked=now)
    name, own = pod_name(os.environ), os.environ.get("MINIVM_POD_IP", "")
    try:
        reason = unproven(client.node(name, controller, within=DEADLINE_S), name, [own] if own else [])
    except client.SlurmError as error:
        reason = error.why
    if reason:
        # slurmd answers: the fault is slurmctld's, or between the two.
        return memory, AnswerCheck(Fault.REFUSED, f"no word from slurmctld for {HEARD_S:g} s, and {reason}")
    return replace(memory, proven=now), AnswerCheck()


def load(file: Path = FILE) -> CheckHistory:
    try:
        return CheckHistory(**read_json(file))
    except TypeError:  # from another release
        return CheckHistory()


def save(memory: CheckHistory, file: Path = FILE) -> None:
    write_json(file, fields(memory), mode=0o600)


def restart_daemon(names: tuple[str, ...]) -> str:
    """Restart the first of these services that this pod has, unless it has just started; return a line for the log."""
    try:
        with Client() as control:
            for name in names:
                view = service(control, name)
                if view is not None and view.state == "ready" and view.uptime >= YOUNG_S:
                    control.request("restart", service=name, wait=False)
                    return f"restarting {name}, which has not answered for {SILENT_S:g} s"
    except (InitError, EOFError) as error:
        return f"restart: {error}"
    return ""


def main() -> int:
    controller, now, memory = client.address(os.environ), time.monotonic(), load()
    try:
        handover.end_hanging(("slurmd", "slurmd-static", "sackd"))
    except (InitError, EOFError, OSError) as error:
        print(f"hand-over: {error}", file=sys.stderr, flush=True)
    if WORKER in os.environ:
        daemons: tuple[str, ...] = ("slurmd", "slurmd-static")
        memory, finding = ask_as_worker(controller, memory, now)
    else:
        daemons = ("slurmctld",)
        finding = ask_as_user(controller, host_and_port(controller)[1])
    memory, reason, restart = judge(memory, finding, now)
    if restart and (news := restart_daemon(daemons)):
        print(news, file=sys.stderr, flush=True)
        memory = replace(memory, restarted=now, silent_since=0.0)
    save(memory)
    if reason:
        print(reason, flush=True)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
