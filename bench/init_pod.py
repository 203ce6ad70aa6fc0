"""A PID 1 in its own namespace, and a pipe on which services report that they run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PATIENCE = 60.0


class BenchPod:
    """Run argv as PID 1. `began` is the moment before its exec, on the system-wide clock."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-init-"))
        self.mark = self.directory / "mark"
        os.mkfifo(self.mark)
        self._marks = os.open(self.mark, os.O_RDWR | os.O_NONBLOCK)
        self.began = 0.0
        self.pid = 0
        self._outer = 0

    def start(self, argv: list[str], output: int, env: dict[str, str] | None = None) -> None:
        read, write = os.pipe()
        outer = os.fork()
        if not outer:
            try:
                self._enter(argv, output, write, env or {})
            finally:
                os._exit(127)
        os.close(write)
        with os.fdopen(read) as stream:
            self.pid, self.began = int(stream.readline()), float(stream.readline())
        self._outer = outer

    def _enter(self, argv: list[str], output: int, report: int, env: dict[str, str]) -> None:
        libc = ctypes.CDLL(None)
        if libc.unshare(CLONE_NEWPID | CLONE_NEWNS) != 0:
            raise OSError("unshare")
        ready, go = os.pipe()
        inner = os.fork()
        if inner:
            os.write(report, f"{inner}\n".encode())
            os.write(go, b"x")
            os.waitpid(inner, 0)
            os._exit(0)
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
        os.read(ready, 1)
        os.dup2(output, 1)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        run = self.directory / "run"
        own = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "MINIVM_RUN": str(run), "MINIVM_SYSLOG": ""}
        own |= {"MINIVM_HTTP": "127.0.0.1:0"} | env
        os.write(report, f"{time.monotonic()}\n".encode())
        os.set_inheritable(report, False)
        os.execvpe(argv[0], argv, own)

    def marks(self, count: int, patience: float = PATIENCE) -> list[float]:
        """Wait for the next marks; return when each came."""
        found: list[float] = []
        deadline = time.monotonic() + patience
        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._marks], [], [], left)[0]:
                raise TimeoutError(f"{len(found)} of {count} marks")
            found += [time.monotonic()] * len(os.read(self._marks, 4096).split())
        return found

    def inside(self) -> list[int]:
        """Return PID 1's children, by their pids outside the namespace."""
        return [int(word) for word in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def status(self, field: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))

    def pss(self) -> int:
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Pss:")))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> float:
        """Wait for PID 1's end by its pidfd; return when it came."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return time.monotonic()
        if not select.select([fd], [], [], PATIENCE)[0]:
            raise TimeoutError("PID 1 did not end")
        now = time.monotonic()
        os.close(fd)
        return now

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self._outer, 0)
        os.close(self._marks)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> BenchPod:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    load = os.getloadavg()[0]
    kernel = subprocess.run(["uname", "-r"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{os.cpu_count()} x {cpu}, Linux {kernel}, load {load:.1f} when this began"
