"""Client of the pod's job snapshot: what many users ask of slurmctld, the service `job-snapshot` asks once for all.

Without the service, as on workers, each command asks slurmctld itself, with its user's rights.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ground.sockets import read_line
from init.slurm.client import SCONTROL, SQUEUE, SlurmError

SOCKET = Path("/run/minivm/jobs.sock")
SSTAT = "/usr/bin/sstat"
PUBLIC = ("nodes", "partitions", "reservations", "licenses")
WITHIN = 30.0
LONGEST = 1 << 28
_IDS = re.compile(r"--jobs=(\d{1,10}(?:,\d{1,10}){0,63})", re.ASCII)
Run = Callable[[Sequence[str]], str]


def question(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return what the snapshot is asked for a command; None for one that does not reach slurmctld."""
    words = tuple(argv)
    if words[:3] == (SQUEUE, "--json", "--states=all") and len(words) == 4:
        if words[3] == "--me":
            return {"ask": "mine"}
        if match := _IDS.fullmatch(words[3]):
            return {"ask": "jobs", "ids": match[1].split(",")}
    if words[:3] == (SCONTROL, "--json", "show") and len(words) == 4 and words[3] in PUBLIC:
        return {"ask": words[3]}
    return {"ask": "turn"} if words[0] in (SQUEUE, SCONTROL, SSTAT) else None


def shared(direct: Run, path: Path = SOCKET) -> Run:
    """Return a runner of Slurm's clients that takes from the snapshot what it has."""

    def run(argv: Sequence[str]) -> str:
        asked = question(argv)
        reply = _ask(path, asked) if asked else None
        if reply is None or reply.get("direct") is True:
            return direct(argv)
        if "why" in reply:
            raise SlurmError("ask slurmctld", str(reply["why"]))
        return json.dumps({"jobs": reply["jobs"]}) if "jobs" in reply else str(reply.get("text", ""))

    return run


def _ask(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reply; None where no service listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
        client.settimeout(WITHIN)
        try:
            client.connect(os.fspath(path))
        except OSError:
            return None
        try:
            client.sendall(json.dumps(asked).encode() + b"\n")
            reply = json.loads(read_line(client, WITHIN, LONGEST))
        except (OSError, ValueError, RecursionError):
            reply = None
    if not isinstance(reply, dict):
        raise SlurmError("ask slurmctld", f"this pod's job snapshot gave no answer within {WITHIN:g} s; try again")
    return reply
