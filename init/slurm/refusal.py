"""Why slurmctld refuses a credential: the clock's difference to the controller, or the releases of both.

munge refuses credentials older than five minutes, or from the future, auth/slurm those older than one minute, and
slurmctld then answers as for a wrong key. The controller's init sends the time with every HTTP answer, without a key.
If it does not answer, nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import calendar
import socket
import time

from init.pod.addresses import host_and_port
from init.pod.auth import LIVES, mode
from init.pod.release import FILE, Release, of_json

HTTP_PORT = 8650  # the controller's MINIVM_HTTP in our chart
PATIENCE = 1.0
ROUNDING = 2.0  # `Date` has whole seconds, and the answer takes time
STAMP = "%a, %d %b %Y %H:%M:%S GMT"


def explain_clock(ahead: float) -> str:
    """Return the reason if the clocks are too far apart for a credential, else ""."""
    if abs(ahead) < LIVES[mode()] - ROUNDING:
        return ""
    return f"this node's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the controller's"


def date_of(answer: bytes) -> float | None:
    """Return the `Date` of an HTTP answer, in seconds since the epoch."""
    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"date":
            try:
                return float(calendar.timegm(time.strptime(value.strip().decode("latin-1"), STAMP)))
            except ValueError:
                return None
    return None


def ahead_of(controller: str, port: int = HTTP_PORT) -> float | None:
    """Return by how many seconds our clock is ahead of the controller's; None if its init does not answer."""
    host, _ = host_and_port(controller)
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=PATIENCE) as stream:
            stream.sendall(b"HEAD /livez HTTP/1.0\r\n\r\n")
            while len(answer) < 4096 and (chunk := stream.recv(4096)):
                answer += chunk
    except OSError:
        if not answer:
            return None
    controller_time = date_of(answer)
    return None if controller_time is None else time.time() - controller_time


# The controller's protocol version, queried when slurmctld refuses a credential, to explain the refusal.
#
# slurmctld answers a newer release's message like a wrong key: it never reads the credential. Its answer starts with
# the number of its own release, even to an invalid message.


# A message's length in four bytes and a release number in two, which no release has; slurmctld ignores the rest.
QUESTION = b"\0\0\0\x42\xff\xff" + bytes(64)
BEGIN = 6  # bytes at the start of its answer, in the same format


def explain_release(own: Release | None, spoken: int | None, controller: str) -> str:
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


def own_release() -> Release | None:
    try:
        with open(FILE) as file:  # noqa: PTH123 (pathlib costs 8 ms)
            return of_json(file.read())
    except OSError:
        return None
