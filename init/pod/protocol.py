"""Which release's messages the controller speaks: asked when slurmctld refuses a credential, to tell why.

To a message of a newer release slurmctld answers with the same words as to a wrong key: it never came to look at the
credential. Its answer begins with the number of its own release, also that to a message of none.
"""

from __future__ import annotations

import socket

from init.pod.addresses import host_and_port
from init.pod.release import FILE, Release, of_json

PATIENCE = 1.0
# A message's length in four bytes, its release's number in two, and none has that; the rest is not looked at.
QUESTION = b"\0\0\0\x42\xff\xff" + bytes(64)
BEGIN = 6  # of its answer: the same


def explain(ours: Release | None, theirs: int | None, controller: str) -> str:
    """The reason where slurmctld does not understand this image, or nothing."""
    if ours is None or theirs is None or theirs >= ours.protocol:
        return ""
    return (
        f"{controller} has Slurm {ours.called(theirs)}, which does not understand this image's {ours.name}:"
        " the controller is upgraded first"
    )


def spoken_by(controller: str) -> int | None:
    """The number of its release; None where it does not tell: from 26.05 on what is no message may be HTTP to it."""
    answer = b""
    try:
        with socket.create_connection(host_and_port(controller), timeout=PATIENCE) as stream:
            stream.sendall(QUESTION)
            while len(answer) < BEGIN and (chunk := stream.recv(64)):
                answer += chunk
    except OSError:
        pass
    # A short message, and a number as releases have them: not anybody's words.
    return answer[4] if len(answer) >= BEGIN and answer[:2] == b"\0\0" and answer[4] and not answer[5] else None


def own() -> Release | None:
    try:
        with open(FILE) as file:  # noqa: PTH123 (pathlib costs 8 ms)
            return of_json(file.read())
    except OSError:
        return None
