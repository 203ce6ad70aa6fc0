"""slurmctld for helpers that change its configuration: query it, let it reload, kill it when it hangs.

The helpers may wait: never in PID 1.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ground.commands import ran
from init.pod.client import Client, service
from init.slurm.client import SCONTROL, SLURMCTLD, SQUEUE
from init.slurm.conf import expand, words
from init.view.status import ServiceView

# Jobs that a changed configuration might end, from squeue. The parsing is pure.


# The account is last: without accounting its user may have written anything, bars and line breaks included.
FIELDS = ("jobarrayid", "statecompact", "partition", "nodelist", "reqnodes", "tres-alloc", "qos", "account")
SHOW_JOBS = (SQUEUE, "--noheader", "--all", "--Format", ",".join(f"{name}:|" for name in FIELDS))
# `--array`, one line per task, misses a line for an array with a step (24.11), so tasks are counted here.
COUNT_JOBS = (SQUEUE, "--noheader", "--all", "--states=all", "--format=%i")
# A clean environment: SQUEUE_PARTITION and the like would hide jobs. SLURM_BITSTR_LEN=0 shows all array tasks.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0"}
ID = re.compile(r"\d[\d_+,%:\[\]-]*", re.ASCII)
WAITING_TASKS = re.compile(r"\d+_\[([\d,:-]+)(?:%\d+)?\]", re.ASCII)
SOME_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
WAITS = ("PD", "RH", "RQ", "RD", "RF", "SE")


@dataclass(frozen=True, slots=True)
class KnownJob:
    id: str
    holds: bool  # has nodes; otherwise it waits
    partitions: frozenset[str]
    nodes: frozenset[str]
    wanted: frozenset[str]  # nodes requested by name
    account: str
    qos: str
    gres: frozenset[str]


def jobs(text: str) -> Iterator[KnownJob]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|", len(FIELDS) - 1)]
        if len(cells) < len(FIELDS) or not ID.fullmatch(cells[0]):
            continue
        number, state, partitions, nodes, requested, tres, qos, account = cells
        yield KnownJob(
            id=number,
            holds=state not in WAITS,
            partitions=words(partitions),
            nodes=frozenset(expand(_none(nodes))),
            wanted=frozenset(expand(_none(requested))),
            account=_none(account.removesuffix("|")),
            qos=_none(qos),
            gres=frozenset(
                part.partition("=")[0].removeprefix("gres/").partition(":")[0]
                for part in tres.split(",")
                if part.startswith("gres/")
            ),
        )


def count(text: str) -> int | None:
    """Count the jobs in a list of ids, each array task as one: 7, 8_2, 9+1, 12_[0-8:2,11%3]; None if one is invalid."""
    total = 0
    for line in text.splitlines():
        array = WAITING_TASKS.fullmatch(line.strip())
        if array is None:
            if "[" in line or not ID.fullmatch(line.strip()):
                return None
            total += 1
            continue
        for part in array[1].split(","):
            tasks = SOME_TASKS.fullmatch(part)
            if tasks is None:
                return None
            first, last, step = int(tasks[1]), int(tasks[2] or tasks[1]), int(tasks[3] or 1)
            total += len(range(first, last + 1, step or 1))
    return total


def _none(text: str) -> str:
    return "" if text in ("(null)", "N/A", "n/a", "(None assigned)") else text


# Slurm's messages about a new slurm.conf, as a sentence for people.
NO_ANSWER = ("timed out", "Unable to contact slurm controller", "connect failure")
OVERLAP = 50  # lines by which two reads of a log are joined
# slurmctld quotes the rest of a line that it cannot parse; a password in it must not reach the pod's status.
_QUOTED_LINE = re.compile(r'(Parse error in file \S+ line \d+): ".*"')


def objection(stderr: str, directory: str) -> str:
    """Return why a client cannot read a candidate in that directory, or ""; other complaints are ignored."""
    if "fatal:" not in stderr:
        return ""
    errors = [line.partition("error: ")[2].strip() for line in stderr.splitlines() if "error: " in line]
    return tidy("; ".join(errors) or stderr.strip(), directory)


def complaint(log: Sequence[str], stderr: str) -> str:
    """Return why slurmctld refused a file: its log tells, its client only prints "Unspecified error"."""
    messages = [line.strip() for line in stderr.splitlines() if line.strip()]
    for mark in ("fatal: ", "error: "):
        marked = [line.partition(mark)[2].strip() for line in log if mark in line]
        if marked and (mark == "fatal: " or not messages):
            return tidy(marked[-1])
    return tidy(messages[-1]) if messages else "refused without a reason"


def new_lines(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines added to a log between two reads, where the log keeps only its newest; all if none remain."""
    previous = list(before[-OVERLAP:])
    for end in range(len(previous), len(after) + 1):
        if list(after[end - len(previous) : end]) == previous:
            return list(after[end:])
    return list(after)


def is_unanswered(stderr: str) -> bool:
    """Tell if the client gave up waiting: slurmctld has not refused."""
    return any(words in stderr for words in NO_ANSWER)


def tidy(text: str, directory: str = "") -> str:
    text = _QUOTED_LINE.sub(r"\1", text)
    return text.replace(f"{directory}/", "") if directory else text


PROC = Path("/proc")
SERVICE = "slurmctld"
DOWN = ("failed", "backoff", "stopped")
READ_WITHIN = 60.0  # for a client that reads a candidate and then contacts the controller that it names
APPLY_WITHIN = 120.0  # for a reconfigure: names that do not resolve cost ten seconds each
ALIVE_WITHIN = 12.0  # one that has not answered by then hangs
ONE_PING = 4.0
BACK_WITHIN = 60.0  # for a start with saved state
PAUSE = 0.2


class ReconfigureOutcome(Enum):
    LIVE = "live"
    REFUSED = "refused"  # it refused
    SILENT = "silent"  # it did not answer
    UNKNOWN = "unknown"  # the cost of the change is unknown


class ReconfigureAnswer(NamedTuple):
    outcome: ReconfigureOutcome
    text: str


class Slurmctld:
    def __init__(self, control: Path) -> None:
        self.control = control

    def objects_to(self, configuration: Path) -> str:
        """Return a Slurm client's errors about a slurm.conf and its neighbours, or "".

        A client reports unknown keys, bad values, missing plugins. slurmctld itself cannot test a file (24.11).
        """
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_CONF": str(configuration)}
        try:
            done = _scontrol("ping", within=READ_WITHIN, env=env)
        except subprocess.TimeoutExpired:
            return ""  # the file was read, and the controller that it names does not answer: slurmctld will tell
        return objection(done.stderr, str(configuration.parent))

    def jobs(self) -> list[KnownJob] | None:
        """Return the waiting and running jobs, hidden partitions included; None if slurmctld does not answer."""
        try:
            done = ran(SHOW_JOBS, within=READ_WITHIN, env=ENVIRONMENT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return list(jobs(done.stdout)) if done.returncode == 0 else None

    def known_jobs(self) -> int | None:
        """Count the jobs that slurmctld knows, including ended ones and each array task; None if it does not answer."""
        try:
            done = ran(COUNT_JOBS, within=READ_WITHIN, env=ENVIRONMENT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return count(done.stdout) if done.returncode == 0 else None

    def reload(self) -> ReconfigureAnswer:
        """Run slurmctld with the installed configuration: reconfigure it, or start it if a bad file kept it down."""
        with Client(self.control, within=APPLY_WITHIN) as client:
            view = _steady(client)
            if view is None:
                return ReconfigureAnswer(ReconfigureOutcome.REFUSED, "this pod has no slurmctld")
            logged = _last_lines(client)
            if view.state in DOWN:
                return self._start(client, view, logged)
        try:
            done = _scontrol("reconfigure", within=APPLY_WITHIN)
        except subprocess.TimeoutExpired:
            return ReconfigureAnswer(ReconfigureOutcome.SILENT, f"slurmctld gave no answer within {APPLY_WITHIN:g} s")
        if done.returncode == 0:
            return ReconfigureAnswer(ReconfigureOutcome.LIVE, "slurmctld runs with it")
        if is_unanswered(done.stderr):
            return ReconfigureAnswer(ReconfigureOutcome.SILENT, "slurmctld gave no answer")
        return ReconfigureAnswer(ReconfigureOutcome.REFUSED, self._complaint(logged, done.stderr))

    def _start(self, client: Client, before: ServiceView, logged: list[str]) -> ReconfigureAnswer:
        """Start it and wait for an answer: it sends READY before it has read its whole file, and may still die."""
        client.request("start", service=SERVICE, wait=True)

        def outcome() -> bool | None:
            view = service(client, SERVICE)
            return False if view is None or view.failures > before.failures else _pings() or None

        if _once(outcome, ALIVE_WITHIN):
            return ReconfigureAnswer(ReconfigureOutcome.LIVE, "slurmctld is started with it")
        return ReconfigureAnswer(ReconfigureOutcome.REFUSED, self._complaint(logged, ""))

    def _complaint(self, logged: list[str], stderr: str) -> str:
        with Client(self.control) as client:
            return complaint(new_lines(logged, _last_lines(client)), stderr)

    def does_not_start(self) -> str:
        """Return why it does not run with its configuration; "" while it runs or may still come up."""
        with Client(self.control) as client:
            view = service(client, SERVICE)
            if view is None or view.ready or not view.failures or view.state == "stopped":
                return ""
            return complaint(_last_lines(client), "")

    def revive(self) -> bool:
        """Make it answer again: wait, start it, or kill it if it hangs and start it. True if it was killed.

        After a refused reconfigure 24.11 sometimes hangs for ever, and every release does while its database does not
        answer a reload. It has saved its state before, and jobs continue without it.
        """
        with Client(self.control, within=APPLY_WITHIN) as client:
            view = service(client, SERVICE)
            if view is not None and view.state in DOWN:
                client.request("start", service=SERVICE, wait=True)
        if view is None or view.state in DOWN or self.answers():
            return False
        kill_others_of_its_session(view.pid)
        with Client(self.control) as client:
            client.request("signal", service=SERVICE, signal="KILL")
        self._wait_for_another(view.pid)
        return True

    def answers(self) -> bool:
        """Wait for an answer; a refused connection may mean that it is starting."""
        return bool(_once(lambda: _pings() or None, ALIVE_WITHIN))

    def _wait_for_another(self, pid: int) -> None:
        def another() -> bool | None:
            with Client(self.control) as client:
                view = service(client, SERVICE)
            return view is None or (view.ready and view.pid != pid) or None

        _once(another, BACK_WITHIN)


def kill_others_of_its_session(pid: int) -> None:
    """Kill the other slurmctld that a reload starts: it holds the ports, and would keep them from the next one."""
    with suppress(OSError):
        session = os.getsid(pid)
        for other in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
            with suppress(OSError):
                if other != pid and os.getsid(other) == session and _name(other) == Path(SLURMCTLD).name:
                    os.kill(other, signal.SIGKILL)


def _last_lines(client: Client) -> list[str]:
    return [str(line) for line in client.request("logs", service=SERVICE, lines=400)["lines"]]


def _name(pid: int) -> str:
    return (PROC / str(pid) / "comm").read_text().strip()


def _steady(client: Client) -> ServiceView | None:
    """Wait until it is neither starting nor stopping: before it listens, its answer means nothing."""

    def steady() -> bool | None:
        view = service(client, SERVICE)
        return view is None or view.ready or view.state in DOWN or None

    _once(steady, BACK_WITHIN)
    return service(client, SERVICE)


def _once(look: Callable[[], bool | None], within: float) -> bool | None:
    """Repeat a look until it returns something; None if it does not in time."""
    end = time.monotonic() + within
    while (result := look()) is None and time.monotonic() < end:
        time.sleep(PAUSE)
    return result


def _pings() -> bool:
    try:
        return _scontrol("ping", within=ONE_PING).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _scontrol(word: str, *, within: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return ran((SCONTROL, word), within=within, env=env)
