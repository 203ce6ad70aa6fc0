"""How far this node's clock is ahead of the controller's: asked when slurmctld refuses a credential, to tell why.

munge refuses what seems older than five minutes, or from the future, and slurmctld then answers with the same words as
for a wrong key. The controller's own init tells the time with every HTTP answer, without a key. Where nobody answers
there, nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import calendar
import socket
import time

from init.pod.addresses import host_and_port

HTTP_PORT = 8650  # the controller's MINIVM_HTTP in every chart of ours
LIFE = 300.0  # of a munge credential, and of one from the future, in seconds
PATIENCE = 1.0
ROUNDING = 2.0  # `Date` has whole seconds, and the way there takes some
STAMP = "%a, %d %b %Y %H:%M:%S GMT"


def explain(ahead: float) -> str:
    """The reason when the clocks are too far apart for munge, or nothing."""
    if abs(ahead) < LIFE - ROUNDING:
        return ""
    return f"this node's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the controller's"


def date_of(answer: bytes) -> float | None:
    """The `Date` of an HTTP answer, as seconds since the epoch."""
    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"date":
            try:
                return float(calendar.timegm(time.strptime(value.strip().decode("latin-1"), STAMP)))
            except ValueError:
                return None
    return None


def ahead_of(controller: str, port: int = HTTP_PORT) -> float | None:
    """Seconds that our clock is ahead of the controller's; None where its init cannot be asked."""
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
    theirs = date_of(answer)
    return None if theirs is None else time.time() - theirs
