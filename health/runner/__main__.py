"""Resident runner, as a service; the program that slurmd starts for each job is its client.

python3 -I -m health.runner

It only makes runs quicker: without it each client does the run itself.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time

from gitsync.layout import Layout
from ground.sockets import notify
from health.places import Places
from health.runner.server import RunnerServer

# Interval of the watchdog message; PID 1 restarts a runner that is silent for a minute.
ALIVE_S = 10.0


def say(text: str) -> None:
    print(f"runner: {text}", file=sys.stderr, flush=True)


def main() -> int:
    places = Places.from_environment()
    os.chdir("/")
    places.runner.mkdir(mode=0o700, parents=True, exist_ok=True)
    places.runner.chmod(0o700)
    path = places.runner / "socket"
    # A previous server may have owed a check after a job, and its end woke no process.
    owes = path.exists()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as listener:
        mask = os.umask(0o177)
        listener.bind(str(path))
        os.umask(mask)
        # Room for a burst; a client beyond it runs the scripts itself.
        listener.listen(1024)
        server = RunnerServer(listener, places, Layout.from_environment(), say)
        if owes:
            server.after.owe(time.monotonic())
        server.read_ahead()
        server.measure()
        # Freeze these objects, so that a collection in a fork does not copy their pages.
        gc.collect()
        gc.freeze()
        notify("READY=1")
        notified_at = time.monotonic()
        while not server.stopping:
            server.turn()
            if time.monotonic() - notified_at > ALIVE_S:
                notify("WATCHDOG=1")
                notified_at = time.monotonic()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
