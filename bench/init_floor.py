"""The bare Python floor: a supervisor in this language that only starts, tags, reaps and restarts.

No plan, no checks, no order but a chain by file, no readiness, no control, no health. `init` is measured against it.
"""

import json
import os
import select
import signal
import sys


def main(plan: str) -> None:
    with open(plan) as stream:  # noqa: PTH123 - the floor imports nothing it can do without
        services = json.load(stream)
    wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    epoll = select.epoll()
    epoll.register(wake, select.EPOLLIN)
    prefixes: dict[int, bytes] = {}
    carries: dict[int, bytes] = {}
    pids: dict[int, str] = {}

    def start(name: str) -> None:
        read, output = os.pipe2(os.O_CLOEXEC)
        prefixes[read], carries[read] = f"{name} | ".encode(), b""
        epoll.register(read, select.EPOLLIN)
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(output, 1)
            os.execv(services[name][0], services[name])
        os.close(output)
        pids[pid] = name

    for name in services:
        start(name)
    stopping = False
    while pids:
        for fd, _ in epoll.poll():
            if fd != wake:
                chunk = os.read(fd, 1 << 18)
                if not chunk:
                    epoll.unregister(fd)
                    os.close(fd)
                    continue
                data = carries[fd] + chunk
                end = data.rfind(b"\n") + 1
                carries[fd] = data[end:]
                if end:
                    tag = prefixes[fd]
                    block = tag + data[: end - 1].replace(b"\n", b"\n" + tag) + b"\n"
                    while block:
                        block = block[os.write(1, block) :]
                continue
            if signal.SIGTERM in os.read(wake, 4096):
                stopping = True
                for pid in pids:
                    os.kill(pid, signal.SIGTERM)
            while True:
                try:
                    pid, _ = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if not pid:
                    break
                name = pids.pop(pid, None)
                if name is not None and not stopping:
                    start(name)


main(sys.argv[1])
os._exit(0)
