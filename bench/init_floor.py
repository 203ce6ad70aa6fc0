"""The bare Python floor: a supervisor in this language that only starts, tags, reaps and restarts.

No plan, no checks, no order but a chain by file, no readiness, no control, no health. `init` is measured against it.
"""

import json
import os
import select
import signal
import sys


class BareSupervisor:
    def __init__(self, services: dict[str, list[str]]) -> None:
        self.services = services
        self.wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.epoll = select.epoll()
        self.epoll.register(self.wake, select.EPOLLIN)
        self.prefixes: dict[int, bytes] = {}
        self.carries: dict[int, bytes] = {}
        self.pids: dict[int, str] = {}
        self.stopping = False

    def run(self) -> None:
        for name in self.services:
            self.start(name)
        while self.pids:
            for fd, _ in self.epoll.poll():
                if fd != self.wake:
                    self.tag(fd)
                    continue
                if signal.SIGTERM in os.read(self.wake, 4096):
                    self.stop()
                self.reap()

    def start(self, name: str) -> None:
        read, output = os.pipe2(os.O_CLOEXEC)
        self.prefixes[read], self.carries[read] = f"{name} | ".encode(), b""
        self.epoll.register(read, select.EPOLLIN)
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(output, 1)
            os.execv(self.services[name][0], self.services[name])
        os.close(output)
        self.pids[pid] = name

    def tag(self, fd: int) -> None:
        """Write the whole lines of a service's output, each with the service's name; keep the rest of the last one."""
        chunk = os.read(fd, 1 << 18)
        if not chunk:
            self.epoll.unregister(fd)
            os.close(fd)
            return
        data = self.carries[fd] + chunk
        end = data.rfind(b"\n") + 1
        self.carries[fd] = data[end:]
        if end:
            tag = self.prefixes[fd]
            block = tag + data[: end - 1].replace(b"\n", b"\n" + tag) + b"\n"
            while block:
                block = block[os.write(1, block) :]

    def stop(self) -> None:
        self.stopping = True
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)

    def reap(self) -> None:
        """Reap the ended processes, and restart their services unless the supervisor stops."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            name = self.pids.pop(pid, None)
            if name is not None and not self.stopping:
                self.start(name)


with open(sys.argv[1]) as stream:  # noqa: PTH123 - the floor imports nothing it can do without
    BareSupervisor(json.load(stream)).run()
os._exit(0)
