"""The controller's protocol version, queried when slurmctld refuses a credential, to explain the refusal.

slurmctld answers a newer release's message like a wrong key: it never reads the credential. Its answer starts with the
number of its own release, even to an invalid message.
"""

from __future__ import annotations

import socket

from init.pod.addresses import host_and_port
from init.pod.release import FILE, Release, of_json

PATIENCE = 1.0
# A message's length in four bytes and a release number in two, which no release has; slurmctld ignores the rest.
QUESTION = b"\0\0\0\x42\xff\xff" + bytes(64)
BEGIN = 6  # bytes at the start of its answer, in the same format


def explain(own: Release | None, spoken: int | None, controller: str) -> str:
    """Return the reason if slurmctld does not understand this image, else ""."""
    if own is None or spoken is None or spoken >= own.protocol:
        return ""
    return (
        f"{controller} has Slurm {own.called(spoken)}, which does not understand this image's {own.name}:"
        " the controller is upgraded first"
    )


def spoken_by(controller: str) -> int | None:
    """Return its release's number; None if unknown: from 26.05 on slurmctld may take an invalid message for HTTP."""
    answer = b""
    try:
        with socket.create_connection(host_and_port(controller), timeout=PATIENCE) as stream:
            stream.sendall(QUESTION)
            while len(answer) < BEGIN and (chunk := stream.recv(64)):
                answer += chunk
    except OSError:
        pass
    # A short message with a plausible release number, not any text.
    return answer[4] if len(answer) >= BEGIN and answer[:2] == b"\0\0" and answer[4] and not answer[5] else None


def own() -> Release | None:
    try:
        with open(FILE) as file:  # noqa: PTH123 (pathlib costs 8 ms)
            return of_json(file.read())
    except OSError:
        return None
