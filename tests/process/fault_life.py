"""Run one life of PID 1 in which strace makes the kernel refuse a system call at a chosen place.

Only PID 1 is traced, not its children. Its life has five services of every kind of readiness, preparations, a
hand-over to another main process, a restart, a reload, a kill, requests, HTTP, syslog, and the stop.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from init.errors import InitError
from init.pod.client import Client
from init.view.status import ServiceView
from tests.process.init_world import World, python, shell
from tests.waiting import PATIENCE, until

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
GRACE = 6.0
ENTRY = f"""
from __future__ import annotations  # is loaded before the first line that could catch anything
import signal
name = {str(ROOT / "init" / "__main__.py")!r}
code = compile(open(name).read(), name, "exec")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
signal.sigwait([signal.SIGUSR1])  # sent when PID 1 is traced
signal.pthread_sigmask(signal.SIG_SETMASK, [])
exec(code, {{"__name__": "__main__", "__package__": None, "__file__": name}})
"""
HANDS_OVER = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
tell('READY=1')
while True:
    signal.sigwait([signal.SIGUSR1])
    pid = os.fork()
    if pid:
        tell(f'MAINPID={pid}\\nREADY=1')
        time.sleep(0.05)
        os._exit(0)
"""

# What each call can answer where it is asked well. EINTR only where a signal can come in between.
_DESCRIPTORS = ("EMFILE", "ENFILE", "ENOMEM")
FITS: Mapping[str, tuple[str, ...]] = {
    "accept4": (*_DESCRIPTORS, "EINTR", "EAGAIN", "EPERM"),
    "bind": ("ENOMEM", "EPERM"),
    "chmod": ("EPERM", "EIO", "ENOMEM", "ENOSPC"),
    "clone": ("EAGAIN", "ENOMEM", "EPERM"),
    "clone3": ("EAGAIN", "ENOMEM", "EPERM"),
    "close": ("EIO", "EINTR", "ENOSPC"),
    "connect": ("EAGAIN", "EINTR", "EPERM", "ENOMEM"),
    "dup": _DESCRIPTORS,
    "epoll_create1": _DESCRIPTORS,
    "epoll_ctl": ("ENOMEM", "ENOSPC", "EPERM"),
    "epoll_wait": ("EINTR", "ENOMEM"),
    "fchmodat": ("EPERM", "EIO", "ENOMEM", "ENOSPC"),
    "fcntl": ("EPERM", "ENOMEM", "EAGAIN"),
    "fork": ("EAGAIN", "ENOMEM", "EPERM"),
    "fstat": ("ENOMEM", "EIO"),
    "getdents64": ("EIO", "ENOMEM"),
    "getrandom": ("EAGAIN", "EINTR"),
    "getsid": ("EPERM",),
    "getsockopt": ("ENOMEM",),
    "inotify_add_watch": ("ENOSPC", "ENOMEM", "EPERM"),
    "inotify_init1": _DESCRIPTORS,
    "inotify_rm_watch": ("EIO",),
    "ioctl": ("EIO", "ENOMEM", "EPERM"),
    "kill": ("EPERM", "EAGAIN"),
    "listen": ("ENOMEM",),
    "lseek": ("EIO",),
    "lstat": ("ENOMEM", "EIO"),
    "madvise": ("ENOMEM", "EAGAIN"),
    "mkdir": ("EPERM", "EIO", "ENOSPC"),
    "mmap": ("ENOMEM", "EAGAIN"),
    "mprotect": ("ENOMEM",),
    "mremap": ("ENOMEM", "EAGAIN"),
    "munmap": ("ENOMEM",),
    "newfstatat": ("ENOMEM", "EIO", "EPERM"),
    "openat": (*_DESCRIPTORS, "EINTR", "EIO", "EPERM"),
    "pidfd_open": _DESCRIPTORS,
    "pidfd_send_signal": ("EPERM", "ENOMEM"),
    "pipe2": _DESCRIPTORS,
    "prctl": ("EPERM",),
    "read": ("EIO", "EINTR", "ENOMEM"),  # a file never says EAGAIN, and strace cannot spare files
    "readlink": ("EIO", "ENOMEM"),
    "recvfrom": ("EINTR", "EAGAIN", "ENOMEM", "EIO"),
    "recvmsg": ("EINTR", "EAGAIN", "ENOMEM", "EIO"),
    "rename": ("EPERM", "EIO", "ENOSPC"),
    "sendto": ("EINTR", "EAGAIN", "ENOMEM", "EPERM"),
    "setsockopt": ("ENOMEM", "EPERM"),
    "shutdown": ("EIO",),
    "socket": _DESCRIPTORS,
    "stat": ("ENOMEM", "EIO", "EPERM"),
    "unlink": ("EPERM", "EIO", "ENOSPC"),
    "vfork": ("EAGAIN", "ENOMEM", "EPERM"),
    "wait4": ("EINTR",),
    "write": ("EIO", "EINTR", "EAGAIN", "ENOSPC", "ENOMEM", "EPERM"),
    "writev": ("EIO", "EINTR", "EAGAIN", "ENOSPC", "ENOMEM", "EPERM"),
}
# Those that have no error to give when they are asked as PID 1 asks them; and `brk`, whose error strace cannot tell: it
# is a break that did not move, and not a number.
CANNOT_FAIL = frozenset((
    "brk", "chdir", "clock_nanosleep", "exit_group", "futex", "getcwd", "getegid", "geteuid", "getgid", "getpeername",
    "getpgrp", "getpid", "getppid", "getsockname", "gettid", "getuid", "poll", "prlimit64", "restart_syscall",
    "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigtimedwait", "sigaltstack", "sysinfo",
    "umask", "uname",
))  # fmt: skip


@dataclass(frozen=True)
class Fault:
    call: str
    error: str
    when: str  # as strace counts: 3 is the third, 2+5 the second and each fifth after it
    late: bool = False  # counted from when the pod is ready: what fails at the start may be refused before that

    def __str__(self) -> str:
        return f"{self.call} {self.error} {self.when}{' once ready' if self.late else ''}"


@dataclass(frozen=True)
class Outcome:
    """Result of one life: `failed` names a violated invariant; `told` holds the troubles that PID 1 reported."""

    fault: Fault | None
    injected: int
    failed: str = ""
    told: tuple[str, ...] = ()
    calls: Counter[str] | None = None
    refused: bool = False  # before anything was started, with a message


class Gone(AssertionError):
    """PID 1 has ended when nobody asked it to."""


class Life:
    def __init__(self, directory: Path, fault: Fault | None, *, late: bool = False) -> None:
        self.world = World(directory)
        self.fault = fault
        self.late = fault.late if fault else late
        self.log = directory / "syscalls"
        self.mark = self.world.run / "mark"
        self._tracer: subprocess.Popen[bytes] | None = None

    def services(self) -> dict[str, dict[str, Any]]:
        soon = {"delay": "50ms", "max-delay": "300ms"}
        often = {"interval": "100ms"}
        mark = str(self.mark)
        return {
            "hands": {
                "command": python(HANDS_OVER),
                "ready": "notify",
                "reload": {"command": shell('kill -USR1 "$MAINPID"')},
                "restart": soon,
            },
            "asked": {
                "command": ["/bin/sleep", "1001"],
                "prepare": [["/bin/true"]],
                "ready": {"exec": ["/bin/true"], **often},
                "stop": {"command": shell('kill -TERM "$MAINPID"'), "grace": 2},
                "restart": soon,
            },
            "filed": {
                "command": shell(f"sleep 0.05; : > {mark}; exec sleep 1002"),
                "prepare": [["/bin/rm", "-f", mark]],
                "ready": {"file": mark, **often},
                "restart": soon,
            },
            "port": {
                "command": ["/bin/sleep", "1003"],
                "ready": {"tcp": f"127.0.0.1:{self.world.port}", **often},
                "user": "nobody",
                "needs": ["filed"],
                "restart": soon,
            },
            "tick": {"kind": "periodic", "command": ["/bin/true"], "every": "300ms", "restart": soon},
        }

    def begin(self) -> None:
        entry = self.world.directory / "entry.py"
        entry.write_text(ENTRY)
        self.world.start(self.services(), grace=GRACE, entry=["-I", "-S", str(entry)])
        pid = self.world.pid
        until(lambda: _waits(pid), "PID 1 waits to be traced")
        if not self.late:
            self.trace()
        os.kill(pid, signal.SIGUSR1)

    def trace(self) -> None:
        pid = self.world.pid
        inject = [f"-einject={self.fault.call}:error={self.fault.error}:when={self.fault.when}"] if self.fault else []
        trace = [f"-etrace={self.fault.call}"] if self.fault else []
        self._tracer = subprocess.Popen(
            ["strace", "-qq", "-esignal=none", *trace, *inject, "-o", str(self.log), "-p", str(pid)],
            stdin=subprocess.DEVNULL,
        )
        until(lambda: _status(pid, "TracerPid") != "0", "PID 1 is traced")

    # Looking, as somebody who asks again when he is not answered.

    def until(self, look: Callable[[], T], what: str) -> T:
        def again() -> T | None:
            if self.world.process is not None and self.world.process.poll() is not None:
                raise Gone(f"PID 1 has ended with {self.world.process.returncode}: {what}")
            try:
                return look()
            except (OSError, EOFError, InitError, ValueError):
                return None

        found = until(again, what, seen=lambda: self.world.output()[-3000:])
        assert found is not None
        return found

    def ask(self, op: str, **keys: Any) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            with Client(self.world.run / "control.sock", within=8) as client:
                return client.request(op, **keys)

        return self.until(once, f"{op} {keys} is answered")

    def view(self, name: str) -> ServiceView:
        with Client(self.world.run / "control.sock", within=8) as client:
            return next(view for view in client.snapshot().services if view.name == name)

    def ready(self) -> None:
        def look() -> bool:
            with Client(self.world.run / "control.sock", within=8) as client:
                return client.snapshot().ready

        self.until(look, "the pod is ready")

    def running(self) -> Counter[str]:
        """Count the processes that really run in the pod, whatever PID 1 believes."""
        found: Counter[str] = Counter()
        for path in Path(f"/proc/{self.world.pid}/root/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().decode(errors="replace")
            except OSError:
                continue
            found.update(name for words, name in COMMANDS.items() if words in text)
        return found

    def true(self) -> None:
        """Each service once, and the process that PID 1 names is there."""

        def look() -> bool:
            with Client(self.world.run / "control.sock", within=8) as client:
                snapshot = client.snapshot()
            alive = Path(f"/proc/{self.world.pid}/root/proc")
            named = all((alive / str(view.pid)).exists() for view in snapshot.services if view.pid)
            return snapshot.ready and named and self.running() == Counter(COMMANDS.values())

        self.until(look, f"what PID 1 says is so: {self.running()}")

    # The life.

    def live(self) -> None:
        self.ready()
        if self.late:
            self.trace()
        for path in ("/livez", "/readyz", "/startupz", "/status", "/metrics"):
            self.answers(path)
        before = self.view_of("hands").pid
        self.ask("reload", service="hands")
        self.until(lambda: self.view("hands").pid not in (0, before), "another process is the main one")
        self.ready()
        self.ask("restart", service="filed")
        self.killed("asked")
        self.killed("hands")
        self.say()
        self.ask("logs", service="hands")
        self.ask("trace")
        self.ask("condition", name="seen", text="a condition", expires=0.2)
        self.ready()
        self.true()

    def answers(self, path: str) -> None:
        self.until(lambda: self.world.get(path, within=8)[0] == 200, f"{path} says yes")

    def view_of(self, name: str) -> ServiceView:
        return self.until(lambda: self.view(name), f"{name} is shown")

    def killed(self, name: str) -> None:
        before = self.until(lambda: self.view(name).pid, f"{name} runs")
        (host,) = (
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/status")
            if _in_namespace(path, self.world.pid, before)
        )
        os.kill(host, signal.SIGKILL)
        self.until(lambda: self.view(name).pid not in (0, before) and self.view(name).ready, f"{name} runs again")

    def say(self) -> None:
        """Send syslog lines until PID 1 listens: programs send more than one line, so a later one arrives."""
        path = str(self.world.directory / "log")

        def once() -> bool:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
                stream.sendto(b"<13>Jan  1 00:00:00 test: a line of syslog", path)
            return "test: a line of syslog" in self.world.output()

        self.until(once, "what is said to syslog stands in the log")

    def stop(self) -> int:
        self.world.term()
        assert self.world.process is not None
        return self.world.process.wait(GRACE + PATIENCE)

    def run(self) -> Outcome:
        failed, code = "", None
        try:
            self.begin()
            self.live()
            code = self.stop()
            if code not in (0, 75):
                failed = f"it was stopped, and ended with {code}"
        except Gone as error:
            failed = str(error).partition("\n")[0]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failed = str(error).partition("\n")[0][:200]
        finally:
            self.world.close()
            if self._tracer is not None:
                self._tracer.wait(20)
        output = self.world.output() if self.world.out.exists() else ""
        refused = failed.startswith("PID 1 has ended with 71:") and "minivm: cannot begin: " in output
        refused = refused or (failed.startswith("PID 1 has ended with 78:") and "minivm: " in output)
        if refused and " | " not in output:
            failed = ""
        elif not failed and re.search(r"^Traceback|a bug of init", _without_pythons_own(output), re.MULTILINE):
            failed = "a traceback"
        if failed and (last := re.findall(r"^\w+(?:Error|Exception).*", output, re.MULTILINE)):
            failed += f" ({last[-1][:100]})"
        told = tuple(line for line in output.splitlines() if TOLD.search(line))
        told += ("something had to be killed (75)",) if code == 75 else ()
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        calls = Counter(line.split("(", 1)[0] for line in lines if "(" in line)
        return Outcome(self.fault, sum("(INJECTED" in line for line in lines), failed, told, calls, refused)


COMMANDS = {
    "sleep\x001001\x00": "asked",
    "sleep\x001002\x00": "filed",
    "sleep\x001003\x00": "port",
    "signal.sigwait(": "hands",
}


TOLD = re.compile(r"trouble|cannot|tried again|lost|refused")
_WAKE_UP = re.compile(r"Exception ignored when trying to (write|send) to the signal wakeup fd:\nTraceback[^\n]*\n")


def _without_pythons_own(output: str) -> str:
    """Drop what the interpreter prints when it cannot write a signal's byte; PID 1 writes the byte again."""
    return _WAKE_UP.sub("", output)


def _status(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:"))


def _waits(pid: int) -> bool:
    return bool(int(_status(pid, "SigBlk"), 16) >> (signal.SIGUSR2 - 1) & 1)


def _in_namespace(path: Path, first: int, pid: int) -> bool:
    """Tell whether the process has this number in the namespace in which `first` is PID 1."""
    try:
        words = next(line.split() for line in path.read_text().splitlines() if line.startswith("NSpid:"))
        same = (path.parent / "ns/pid").readlink() == Path(f"/proc/{first}/ns/pid").readlink()
    except (OSError, StopIteration):
        return False
    return same and words[-1] == str(pid)


def live(fault: Fault | None, *, late: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="minivm-fault-") as directory:
        return Life(Path(directory), fault, late=late).run()


def census(outcome: Outcome) -> dict[str, int]:
    """Count the calls of PID 1 that can fail, in a life without faults."""
    assert not outcome.failed, outcome.failed
    calls = {name: count for name, count in (outcome.calls or Counter()).items() if re.fullmatch(r"[a-z]\w*", name)}
    unknown = sorted(set(calls) - set(FITS) - CANNOT_FAIL)
    assert not unknown, f"nobody has said how these can fail: {', '.join(unknown)}"
    return {name: count for name, count in sorted(calls.items()) if name in FITS}


def places(count: int) -> list[str]:
    """List the injection places: the first call, a middle one, each k-th, and the first twenty in a row (an outage)."""
    step = 3 if count < 20 else 5 if count < 60 else 7
    return list(dict.fromkeys(("1", str(max(1, count // 2)), f"{step}+{step}", "1..20")))
