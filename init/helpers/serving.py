"""Check that Slurm answers users' requests: a periodic check that the pod's readiness waits for.

Exit code 1, and the reason as the only line. On the controller and on login pods an unprivileged user lists the
partitions, which needs Slurm's authentication and slurmctld's locks. While nothing listens at slurmctld's address a
login pod is degraded and stays ready: without a ready pod nobody could log in to files and editors. A worker asks its
own slurmd when slurmctld last contacted it, and asks slurmctld itself once after its registration, then only when that
contact is long ago: thousands of workers add no load. One failure in a row changes nothing (`CheckHistory`). A daemon
that stays silent is restarted: jobs run on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from datetime import datetime
from enum import Enum
from pathlib import Path

from ground.commands import ran
from ground.files import read_json, write_json
from init.errors import InitError
from init.lean import fields, record, replace
from init.places import pod_name
from init.pod.addresses import find_crowd, host_and_port
from init.pod.client import SOCKET, Client, condition, log, service
from init.slurm import client
from init.slurm.node import has_stale_address, unproven
from init.slurm.registration import WORKER

# End a hand-over of slurmd or sackd that hangs.
#
# At a reconfigure the old process forks twice: the first child ends at once, the second becomes the new daemon and
# reports when it serves. The old one waits for both without limit, and only then names the new main process to PID 1.
# If either hangs (a lock that another thread held at the fork, an authentication daemon that is away), PID 1 follows
# the old one for ever, which answers no client or has no control any more. Slurm announces no hand-over, so look for
# processes that only a hand-over starts: of the old one's session, command line and user, and younger. slurmctld
# always has such a one (slurmscriptd), and is not looked at.


# For a hand-over, which takes a second. While the successor hangs nothing answers slurmctld, which gives up the node
# and its jobs after SlurmdTimeout (the chart's: 120 s).
HANDOVER_S = 30.0
REMEMBERED_S = 600.0  # how long the pod's status shows it
EXIT_S = 2.0  # for the old process to exit once its successor is gone


@record(frozen=True, slots=True)
class Process:
    pid: int
    started: float  # seconds since the machine's boot
    session: int
    command: bytes
    user: bytes  # the Uid line: slurmd forks children that open a file for a user, on a file system that may hang

    def hands_over_to(self, other: Process) -> bool:
        alike = (other.session, other.command, other.user) == (self.session, self.command, self.user)
        return alike and other.pid != self.pid and other.started >= self.started


def look_up(pid: int) -> Process | None:
    """Describe a living process; None for one that has ended."""
    directory = Path("/proc", str(pid))
    with contextlib.suppress(OSError, ValueError, IndexError):
        values = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
        status = (directory / "status").read_bytes().splitlines()
        user = next((line for line in status if line.startswith(b"Uid:")), b"")
        if values[0] not in "ZX":
            started = int(values[19]) / os.sysconf("SC_CLK_TCK")
            return Process(pid, started, int(values[3]), (directory / "cmdline").read_bytes(), user)
    return None


def find_processes(session: int) -> Iterable[int]:
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - names alone
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == session:
                yield int(name)


def find_hanging(main: int, now: float) -> list[Process]:
    """Return the processes of a hand-over that is overdue, the oldest first."""
    old = look_up(main)
    if old is None or not old.command:
        return []
    successors = [other for pid in find_processes(old.session) if (other := look_up(pid)) and old.hands_over_to(other)]
    successors.sort(key=lambda other: (other.started, other.pid))
    return successors if successors and now - successors[0].started >= HANDOVER_S else []


def kill_all(processes: Iterable[Process]) -> None:
    """Kill the processes by pidfd: a pid may belong to another process by now."""
    for process in processes:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                if look_up(process.pid) == process:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def wait_for_exit(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def end_hanging(names: Collection[str]) -> None:
    """Restart the first of these services whose hand-over is overdue; jobs run on in their slurmstepd."""
    with Client() as client:
        for view in [view for view in client.snapshot().services if view.name in names]:
            # A first start forks children too: one fetches the configuration.
            settled = view.pid and view.state != "starting"
            hanging = find_hanging(view.pid, time.clock_gettime(time.CLOCK_BOOTTIME)) if settled else []
            if hanging:
                pids = ", ".join(str(process.pid) for process in hanging)
                text = (
                    f"{view.name} (pid {view.pid}) did not hand over to its successor (pid {pids}) within"
                    f" {HANDOVER_S:g} s after a reconfigure, and was restarted; jobs run on"
                )
                log(text)
                condition(SOCKET, f"{view.name}-handover", text, expires=REMEMBERED_S)
                # The successor has the port and would keep it. Without it the old one exits, or serves on as before.
                kill_all(hanging)
                if not wait_for_exit(view.pid, EXIT_S):
                    client.request("restart", service=view.name, wait=False)
                return


FILE = Path("/run/minivm/serving.json")
USER = "nobody"
ANSWER_S = 5.0
CONNECT_S = 3.0
# A login pod's condition while nothing listens at slurmctld's address: set again by each run, every 15 s.
AWAY, AWAY_EXPIRES_S = "slurmctld-away", 60.0
FAILURES = 2  # in a row, before the pod is not ready
# A silent daemon is restarted after this time, and not again for the second. A slurmctld that has just started may be
# busy with its state; a slurmd has none.
SILENT_S, REST_S, YOUNG_S = 120.0, 1800.0, 300.0
# slurmctld contacts each slurmd every 2/3 of SlurmdTimeout. After HEARD_S without contact a worker asks slurmctld, and
# after a failure not sooner than ASK_AGAIN_S. A slurmd that slurmctld has never contacted asks after UNHEARD_S, before
# the health check `slurmd` drains the node: a restored slurmctld has the address of an earlier pod.
HEARD_S, UNHEARD_S, ASK_AGAIN_S = 240.0, 90.0, 90.0
# slurmctld saves a new node's record within 5 s: one that it knows after this time survives its death. Until then the
# worker asks by itself, because a slurmctld that has lost the record never contacts the node.
SAVED_S = 15.0


class Fault(Enum):
    NONE = "none"
    SILENT = "silent"  # no answer in time: a restart may help
    ABSENT = "absent"  # nothing listens at slurmctld's address
    REFUSED = "refused"  # an invalid answer: a restart does not help
    # slurmctld was killed before it saved the node's record, or its state was restored from before this pod: slurmd
    # registers only when it starts.
    FORGOTTEN = "forgotten"


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
    asked_at: float = 0.0
    proven: float = 0.0
    saved: bool = False  # slurmctld knew the node when it must have saved the record
    reason: str = ""
    backfilled: str = ""  # the counts of backfilled jobs when slurmctld last was made to save


def judge(before: CheckHistory, finding: AnswerCheck, now: float) -> tuple[CheckHistory, str, bool]:
    """Return the new memory, the reason why the pod is not ready (or ""), and whether to restart the daemon."""
    if finding.fault is Fault.NONE:
        return replace(before, failures=0, silent_since=0.0, reason=""), "", False
    silent = (before.silent_since or now) if finding.fault in (Fault.SILENT, Fault.ABSENT) else 0.0
    after = replace(before, failures=before.failures + 1, silent_since=silent, reason=finding.reason)
    rested = not before.restarted or now - before.restarted >= REST_S
    restart = bool(silent) and now - silent >= SILENT_S and rested
    if finding.fault is Fault.FORGOTTEN:
        restart = not before.restarted or now - before.restarted >= HEARD_S
    return after, finding.reason if after.failures >= FAILURES else "", restart


def ask_as_user(controller: str, port: int) -> AnswerCheck:
    """Ask as `sinfo` does: this needs authentication and slurmctld's lock on its partitions."""
    command = [client.SCONTROL, "--oneliner", "show", "partition"]
    # A pod that runs as one ordinary user asks as that user.
    unprivileged = {"user": USER, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        done = ran(command, within=ANSWER_S, env=client.environment(controller), **unprivileged)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return AnswerCheck()
    complaint = client.judge(done.stderr or done.stdout, controller) if done is not None else ""
    if done is not None and client.is_rejected(done.stderr):
        return AnswerCheck(Fault.REFUSED, complaint)
    reason = f"slurmctld does not answer authenticated requests within {ANSWER_S:g} s"
    if complaint:
        reason = f"slurmctld does not answer authenticated requests: {complaint}"
    if not listens(controller):
        return AnswerCheck(Fault.ABSENT, f"{reason}; nothing listens at {controller}")
    crowd = find_crowd(port)
    return AnswerCheck(Fault.SILENT, f"{reason}; {crowd}" if crowd else reason)


def listens(controller: str) -> bool:
    try:
        socket.create_connection(host_and_port(controller), CONNECT_S).close()
    except OSError:
        return False
    return True


def degrade(reason: str) -> bool:
    """Show in the pod's status that slurmctld is away, or with an empty text that it is back. False: PID 1 is busy."""
    try:
        condition(SOCKET, AWAY, reason, expires=AWAY_EXPIRES_S)
    except (InitError, EOFError, OSError) as error:
        print(f"condition: {error}", file=sys.stderr, flush=True)
        return False
    return True


CONTACT = "Last slurmctld msg time"  # in the text of `scontrol show slurmd`


def measure_silence(text: str, now: float) -> float:
    """Return the seconds since slurmctld's last contact or slurmd's start; inf: unknown.

    The text is that of `scontrol show slurmd`.
    """
    return min(_ages(text, f"{CONTACT}|Boot time", now), default=float("inf"))


def parse_start(text: str, now: float) -> float:
    """Return the seconds since slurmd's start; 0: unknown. The text is that of `scontrol show slurmd`."""
    return min(_ages(text, "Boot time", now), default=0.0)


def _ages(text: str, names: str, now: float) -> list[float]:
    moments = re.findall(rf"^(?:{names})\s*=\s*(\d\S+)", text, re.MULTILINE)
    return [now - datetime.fromisoformat(moment).timestamp() for moment in moments]


def ask_as_worker(controller: str, memory: CheckHistory, now: float) -> tuple[CheckHistory, AnswerCheck]:
    try:
        done = ran([client.SCONTROL, "show", "slurmd"], within=ANSWER_S, env=client.environment(controller))
    except subprocess.TimeoutExpired:
        return memory, AnswerCheck(Fault.SILENT, f"slurmd of this pod does not answer within {ANSWER_S:g} s")
    if done.returncode:
        complaint = client.judge(done.stderr or done.stdout, "slurmd")
        return memory, AnswerCheck(Fault.SILENT, f"slurmd of this pod does not answer: {complaint}")
    if not memory.saved and parse_start(done.stdout, time.time()) >= SAVED_S:
        memory, finding = ask_whether_saved(controller, memory)
        if finding.fault is not Fault.NONE:
            return memory, finding
    limit = HEARD_S if _ages(done.stdout, CONTACT, time.time()) else UNHEARD_S
    if measure_silence(done.stdout, time.time()) < limit or (now - memory.proven < HEARD_S and memory.proven):
        return memory, AnswerCheck()
    if memory.failures and now - memory.asked_at < ASK_AGAIN_S:
        return memory, AnswerCheck(Fault.REFUSED, memory.reason)
    memory = replace(memory, asked_at=now)
    name, own = pod_name(os.environ), os.environ.get("MINIVM_POD_IP", "")
    try:
        node = client.node(name, controller, within=ANSWER_S)
        addresses = [own] if own else []
        is_forgotten = node is None or has_stale_address(node, addresses)
        fault = Fault.FORGOTTEN if is_forgotten else Fault.REFUSED
        reason = unproven(node, name, addresses)
    except client.SlurmError as error:
        fault, reason = Fault.REFUSED, error.why
    if reason:
        # slurmd answers: the fault is slurmctld's, or between the two.
        return memory, AnswerCheck(fault, f"no word from slurmctld for {limit:g} s, and {reason}")
    return replace(memory, proven=now), AnswerCheck()


def ask_whether_saved(controller: str, memory: CheckHistory) -> tuple[CheckHistory, AnswerCheck]:
    """Ask slurmctld for the node's record. No answer is no fault here: slurmctld may be starting again."""
    name = pod_name(os.environ)
    try:
        node = client.node(name, controller, within=ANSWER_S)
    except client.SlurmError:
        return memory, AnswerCheck()
    if node is None:
        return memory, AnswerCheck(Fault.FORGOTTEN, f"slurmctld has lost the record of {name}, which was registered")
    return replace(memory, saved=True), AnswerCheck()


def save_backfilled(controller: str, memory: CheckHistory) -> CheckHistory:
    """Let slurmctld save the jobs that sched/backfill has started since the last run.

    A slurmctld that is killed before would start such a job a second time, and lose the run that goes on.
    """
    with contextlib.suppress(client.SlurmError):  # tried again in the next run
        counts = client.read_backfilled(client.run([client.SDIAG], controller, within=ANSWER_S))
        if counts != memory.backfilled:
            if counts:
                client.save_jobs(controller)
            memory = replace(memory, backfilled=counts)
    return memory


def load(file: Path = FILE) -> CheckHistory:
    try:
        return CheckHistory(**read_json(file))
    except TypeError:  # from another release
        return CheckHistory()


def save(memory: CheckHistory, file: Path = FILE) -> None:
    write_json(file, fields(memory), mode=0o600)


def restart_daemon(names: tuple[str, ...], reason: str, young: float) -> str:
    """Restart the first of these services that this pod has, unless it is younger; return a line for the log."""
    try:
        with Client() as control:
            for name in names:
                view = service(control, name)
                if view is not None and view.state == "ready" and view.uptime >= young:
                    control.request("restart", service=name, wait=False)
                    return f"restarting {name}: {reason}"
    except (InitError, EOFError) as error:
        return f"restart: {error}"
    return ""


def main() -> int:
    controller, now, memory = client.address(os.environ), time.monotonic(), load()
    try:
        end_hanging(("slurmd", "slurmd-static", "sackd"))
    except (InitError, EOFError, OSError) as error:
        print(f"hand-over: {error}", file=sys.stderr, flush=True)
    if WORKER in os.environ:
        daemons: tuple[str, ...] = ("slurmd", "slurmd-static")
        memory, finding = ask_as_worker(controller, memory, now)
    else:
        daemons = ("slurmctld",)
        finding = ask_as_user(controller, host_and_port(controller)[1])
        if finding.fault is Fault.NONE and client.is_slurmctld_installed():
            memory = save_backfilled(controller, memory)
    failed_before = memory.failures
    memory, reason, restart = judge(memory, finding, now)
    cause = f"it has not answered for {SILENT_S:g} s"
    young = SILENT_S if WORKER in os.environ else YOUNG_S
    if finding.fault is Fault.FORGOTTEN:
        # A static node that slurmctld does not know is missing in slurm.conf.
        cause, young, daemons = finding.reason, SAVED_S, ("slurmd",)
    if restart and (news := restart_daemon(daemons, cause, young)):
        print(news, file=sys.stderr, flush=True)
        memory = replace(memory, restarted=now, silent_since=0.0, saved=False)
    save(memory)
    if WORKER not in os.environ and not client.is_slurmctld_installed():
        away = reason if finding.fault is Fault.ABSENT else ""
        if (away or failed_before) and degrade(away) and away:
            reason = ""
    if reason:
        print(reason, flush=True)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
