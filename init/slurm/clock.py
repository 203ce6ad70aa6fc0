"""Clock difference to the controller, measured when slurmctld refuses a credential, to explain the refusal.

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

HTTP_PORT = 8650  # the controller's MINIVM_HTTP in our chart
PATIENCE = 1.0
ROUNDING = 2.0  # `Date` has whole seconds, and the answer takes time
STAMP = "%a, %d %b %Y %H:%M:%S GMT"


def explain(ahead: float) -> str:
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
