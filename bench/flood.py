"""Attack a port as one user: connections that stay silent, and beside them some that send garbage over and over.

A program by itself: `python3 -c "$(cat bench/flood.py)" HOST:PORT|SOCKET IDLE BUSY SECONDS [LEAST]`. It prints `open N`
when it holds as many idle connections as it gets in a few seconds, and LEAST, for which it tries longer. It ends after
SECONDS or with its parent. tests/cluster and `bench hostile-users` run it as an unprivileged user.
"""

import contextlib
import os
import resource
import socket
import sys
import threading
import time

PER_PROCESS = 4000  # idle connections: a process's own limit of descriptors must not be the flood's
TRY_S = 2.0
USUAL_S, LONGEST_S = 4.0, 90.0  # to open the connections; a busy machine takes longer
GARBAGE = b"\0\0\0\x08garbage!"


def connect(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    if target.startswith("/"):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(target)  # waits in the kernel where the listener's queue is full
    else:
        stream = socket.create_connection((host, int(port)), timeout=TRY_S)
    return stream


def end_with_the_parent(until: float) -> None:
    """End at the deadline, or when the session that started this program is gone."""
    parent = os.getppid()
    while time.monotonic() < until and os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)  # threads may hang in the kernel


def hold(target: str, wanted: int, until: float, held: list[socket.socket]) -> None:
    """Open connections until there are `wanted`, and open again those that the daemon has closed."""
    while time.monotonic() < until:
        for stream in list(held):
            stream.setblocking(False)
            with contextlib.suppress(OSError):
                if stream.recv(1) == b"":
                    held.remove(stream)
                    stream.close()
        while len(held) < wanted and time.monotonic() < until:
            try:
                held.append(connect(target))
            except OSError:
                time.sleep(0.05)
        time.sleep(0.2)


def annoy(target: str, until: float) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError), connect(target) as stream:
            stream.settimeout(TRY_S)
            stream.sendall(GARBAGE)
            stream.recv(100)
        time.sleep(0.02)


def main(target: str, idle: int, busy: int, seconds: float, least: int = 0) -> None:
    until = time.monotonic() + seconds
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    while idle > PER_PROCESS and os.fork() == 0:
        idle, busy = idle - PER_PROCESS, 0
    sockets: list[socket.socket] = []
    work = [threading.Thread(target=annoy, args=(target, until), daemon=True) for _ in range(busy)]
    work.append(threading.Thread(target=hold, args=(target, min(idle, PER_PROCESS), until, sockets), daemon=True))
    for thread in work:
        thread.start()
    begun, wanted = time.monotonic(), min(idle, PER_PROCESS)
    while len(sockets) < wanted:
        patience = USUAL_S if len(sockets) >= least else LONGEST_S
        if time.monotonic() > begun + min(seconds / 2, patience):
            break
        time.sleep(0.05)
    print("open", len(sockets), flush=True)
    end_with_the_parent(until)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *map(int, sys.argv[5:]))
