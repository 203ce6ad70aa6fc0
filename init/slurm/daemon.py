"""slurmctld, as one who changes its configuration deals with it: asked, told to read anew, killed when it hangs.

For helpers, which may wait: never in PID 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ground.commands import ran
from init.pod import helper
from init.pod.client import Client
from init.slurm.client import SCONTROL
from init.slurm.jobs import COUNT_JOBS, ENVIRONMENT, SHOW_JOBS, Job, count, jobs
from init.slurm.words import complaint, new_lines, objection, unanswered
from init.view.snapshot import ServiceView

PROC = Path("/proc")
PROGRAM = Path("/usr/sbin/slurmctld")
SERVICE = "slurmctld"
DOWN = ("failed", "backoff", "stopped")
READ_WITHIN = 60.0  # for a client that reads a candidate, and then asks whichever controller that names
APPLY_WITHIN = 120.0  # for a reconfigure: names that do not resolve cost ten seconds each
ALIVE_WITHIN = 12.0  # one that has not answered by then hangs
ONE_PING = 4.0
BACK_WITHIN = 60.0  # for a start with saved state
PAUSE = 0.2


class Outcome(Enum):
    LIVE = "live"
    REFUSED = "refused"  # it has said no
    SILENT = "silent"  # it has said nothing
    UNKNOWN = "unknown"  # nobody could be asked what it costs


class Answer(NamedTuple):
    outcome: Outcome
    text: str


class Slurmctld:
    def __init__(self, control: Path) -> None:
        self.control = control

    def objects_to(self, configuration: Path) -> str:
        """What one of Slurm's clients has against a slurm.conf and its neighbours, or nothing.

        It tells unknown keys, bad values, missing plugins. slurmctld itself cannot be asked to test a file (24.11).
        """
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SLURM_CONF": str(configuration)}
        try:
            done = _scontrol("ping", within=READ_WITHIN, env=env)
        except subprocess.TimeoutExpired:
            return ""  # it was read, and the controller it names does not answer: slurmctld will tell
        return objection(done.stderr, str(configuration.parent))

    def jobs(self) -> list[Job] | None:
        """Those that wait or run, however hidden their partition; None when it could not be asked."""
        try:
            done = ran(SHOW_JOBS, within=READ_WITHIN, env=ENVIRONMENT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return list(jobs(done.stdout)) if done.returncode == 0 else None

    def known_jobs(self) -> int | None:
        """Those that have ended too, as long as slurmctld knows them, and each of an array; None as above."""
        try:
            done = ran(COUNT_JOBS, within=READ_WITHIN, env=ENVIRONMENT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return count(done.stdout) if done.returncode == 0 else None

    def read_anew(self) -> Answer:
        """Have it run with the installed configuration: reconfigured, or started where a bad file had kept it down."""
        with Client(self.control, within=APPLY_WITHIN) as client:
            view = _steady(client)
            if view is None:
                return Answer(Outcome.REFUSED, "this pod has no slurmctld")
            logged = helper.last_lines(client, SERVICE)
            if view.state in DOWN:
                return self._start(client, view, logged)
        try:
            done = _scontrol("reconfigure", within=APPLY_WITHIN)
        except subprocess.TimeoutExpired:
            return Answer(Outcome.SILENT, f"slurmctld gave no answer within {APPLY_WITHIN:g} s")
        if done.returncode == 0:
            return Answer(Outcome.LIVE, "slurmctld runs with it")
        if unanswered(done.stderr):
            return Answer(Outcome.SILENT, "slurmctld gave no answer")
        return Answer(Outcome.REFUSED, self._complaint(logged, done.stderr))

    def _start(self, client: Client, before: ServiceView, logged: list[str]) -> Answer:
        """It says READY before it has read all of its configuration, and may die of the rest: it has to answer."""
        client.request("start", service=SERVICE, wait=True)

        def outcome() -> bool | None:
            view = helper.service(client, SERVICE)
            return False if view is None or view.failures > before.failures else _pings() or None

        if _once(outcome, ALIVE_WITHIN):
            return Answer(Outcome.LIVE, "slurmctld is started with it")
        return Answer(Outcome.REFUSED, self._complaint(logged, ""))

    def _complaint(self, logged: list[str], stderr: str) -> str:
        with Client(self.control) as client:
            return complaint(new_lines(logged, helper.last_lines(client, SERVICE)), stderr)

    def does_not_start(self) -> str:
        """Why it does not run with the configuration that it has; nothing while it runs or may still come."""
        with Client(self.control) as client:
            view = helper.service(client, SERVICE)
            if view is None or view.ready or not view.failures or view.state == "stopped":
                return ""
            return complaint(helper.last_lines(client, SERVICE), "")

    def revive(self) -> bool:
        """It answers again: at once, or started, or, where it hung, killed and started. True when it was killed.

        After a refused reconfigure 24.11 sometimes hangs for ever, and any that is to read anew does while its database
        does not answer. It has saved its state before, and jobs run on without it.
        """
        with Client(self.control, within=APPLY_WITHIN) as client:
            view = helper.service(client, SERVICE)
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
        """Refused at once, it may be starting."""
        return bool(_once(lambda: _pings() or None, ALIVE_WITHIN))

    def _wait_for_another(self, pid: int) -> None:
        def another() -> bool | None:
            with Client(self.control) as client:
                view = helper.service(client, SERVICE)
            return view is None or (view.ready and view.pid != pid) or None

        _once(another, BACK_WITHIN)


def kill_others_of_its_session(pid: int) -> None:
    """To read anew it begins another slurmctld, which has its ports: left alone, it keeps them from the next one."""
    with suppress(OSError):
        session = os.getsid(pid)
        for other in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
            with suppress(OSError):
                if other != pid and os.getsid(other) == session and _name(other) == PROGRAM.name:
                    os.kill(other, signal.SIGKILL)


def _name(pid: int) -> str:
    return (PROC / str(pid) / "comm").read_text().strip()


def _steady(client: Client) -> ServiceView | None:
    """Once it is neither starting nor stopping: one that has not begun to listen gives no answer to judge by."""

    def steady() -> bool | None:
        view = helper.service(client, SERVICE)
        return view is None or view.ready or view.state in DOWN or None

    _once(steady, BACK_WITHIN)
    return helper.service(client, SERVICE)


def _once(look: Callable[[], bool | None], within: float) -> bool | None:
    """What a look says once it says anything; None where it has not in that time."""
    end = time.monotonic() + within
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(PAUSE)
    return found


def _pings() -> bool:
    try:
        return _scontrol("ping", within=ONE_PING).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _scontrol(word: str, *, within: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return ran((SCONTROL, word), within=within, env=env)
