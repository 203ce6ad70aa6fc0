"""The resident runner, as a service: what slurmd starts for each job is a client of it.

    python3 -I -m health.runner

It is quicker, and nothing else: without it each client does the run by itself.
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
from health.runner.server import Server

# To PID 1, which ends and starts anew a runner that says nothing for a minute.
ALIVE_S = 10.0


def say(text: str) -> None:
    print(f"runner: {text}", file=sys.stderr, flush=True)


def main() -> int:
    places = Places.from_environment()
    os.chdir("/")
    places.runner.mkdir(mode=0o700, parents=True, exist_ok=True)
    places.runner.chmod(0o700)
    path = places.runner / "socket"
    # Whoever served here before may have owed a look after a job, and its end told nobody.
    owes = path.exists()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as listener:
        mask = os.umask(0o177)
        listener.bind(str(path))
        os.umask(mask)
        # A burst finds room; a client that does not helps itself.
        listener.listen(1024)
        server = Server(listener, places, Layout.from_environment(), say)
        if owes:
            server.after.owe(time.monotonic())
        server.look()
        server.measure()
        # What is here stays: no fork copies it for having looked at it.
        gc.collect()
        gc.freeze()
        notify("READY=1")
        told = time.monotonic()
        while not server.stopping:
            server.turn()
            if time.monotonic() - told > ALIVE_S:
                notify("WATCHDOG=1")
                told = time.monotonic()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
