"""Client of the pod's job snapshot: what many users ask of slurmctld, the service `job-snapshot` asks once for all.

Without the service, as on workers, each command asks slurmctld itself, with its user's rights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ground.sockets import ask
from init.slurm.client import SCONTROL, SQUEUE, SlurmError

SOCKET = Path("/run/minivm/jobs.sock")
WAITING = "waiting"
PUBLIC = ("nodes", "partitions", WAITING)
# All waiting jobs, as any user may list them.
WAITING_JOBS = (SQUEUE, "--local", "--noheader", "--states=PENDING", "--format=%A|%i|%Q|%P|%r")
WITHIN = 5.0
LONGEST = 1 << 28
_IDS = re.compile(r"--jobs=(\d{1,10}(?:,\d{1,10}){0,63})", re.ASCII)
UNKNOWN_JOB = ("Invalid job id", "invalid job id")
Run = Callable[[Sequence[str]], str]


def is_unknown_job(error: SlurmError) -> bool:
    """Tell if slurmctld said that it does not know the job."""
    return any(words in error.output or words in error.why for words in UNKNOWN_JOB)


def build_request(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return the request to the snapshot for a command; None for a command that it does not answer."""
    words = tuple(argv)
    if words[:3] == (SQUEUE, "--json", "--states=all") and len(words) == 4:
        if words[3] == "--me":
            return {"ask": "mine"}
        if match := _IDS.fullmatch(words[3]):
            return {"ask": "jobs", "ids": match[1].split(",")}
    if words[:3] == (SCONTROL, "--json", "show") and len(words) == 4 and words[3] in PUBLIC:
        return {"ask": words[3]}
    return {"ask": WAITING} if words == WAITING_JOBS else None


class Shared:
    """Runner of Slurm's clients that takes from the snapshot what it has, and asks slurmctld itself for the rest."""

    def __init__(self, direct: Run, path: Path = SOCKET) -> None:
        self._direct, self._path = direct, path
        self.is_old = False  # the last answer was the snapshot's: some seconds old, and read with other rights
        self.age = 0.0  # seconds since slurmctld gave the last answer
        self._is_silent = False

    def __call__(self, argv: Sequence[str]) -> str:
        request = None if self._is_silent else build_request(argv)
        reply = self._ask(request) if request else None
        self.is_old = reply is not None and ("jobs" in reply or "text" in reply)
        self.age = float(reply.get("age", 0.0)) if reply is not None and self.is_old else 0.0
        if reply is None or not (self.is_old or "why" in reply):
            return self._direct(argv)
        if "why" in reply:
            raise SlurmError("ask slurmctld", str(reply["why"]))
        return json.dumps({"jobs": reply["jobs"]}) if "jobs" in reply else str(reply["text"])

    def ask_for_all(self, argv: Sequence[str]) -> tuple[str, float] | None:
        """Return the snapshot's answer, and its age, to a question that is too dear to be asked for one user."""
        request = None if self._is_silent else build_request(argv)
        reply = self._ask(request) if request else None
        if reply is None or "text" not in reply:
            return None
        return str(reply["text"]), float(reply.get("age", 0.0))

    def ask_directly(self, argv: Sequence[str]) -> str:
        self.is_old, self.age = False, 0.0
        return self._direct(argv)

    def _ask(self, request: dict[str, Any]) -> Mapping[str, Any] | None:
        """Return the reply; None where no service answers: later questions skip it then."""
        reply = ask(self._path, request, WITHIN, LONGEST)
        self._is_silent = reply is None
        return reply
