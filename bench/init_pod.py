"""A PID 1 in its own namespace, a pipe on which services report that they run, and the peers to compare with."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
        times: list[float] = []
        deadline = time.monotonic() + patience
        while len(times) < count:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._marks], [], [], remaining)[0]:
                raise TimeoutError(f"{len(times)} of {count} marks")
            times += [time.monotonic()] * len(os.read(self._marks, 4096).split())
        return times

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


# The supervisors that init is measured against, each running the same services as PID 1.
ROOT = Path(__file__).resolve().parent.parent
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@dataclass(frozen=True, slots=True)
class Peer:
    """One supervisor; `argv` returns its command, or None if it cannot run the services."""

    name: str

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        raise NotImplementedError

    def available(self) -> bool:
        return True


def after(name: str, directory: Path) -> str:
    return str(directory / f"ready-{name}")


# Said by the checkout that is measured: a plan's form is its own affair. An older one has these modules elsewhere.
COMPILE = """
import json, sys
try:
    from init.plan.compile import compile_plan, plan_to_json
    from init.plan.spec import parse_service
except ImportError:
    from init.plan import compile_plan, plan_to_json
    from init.spec import parse_service
services = json.load(sys.stdin)
print(plan_to_json(compile_plan("bench", [parse_service(name, what, "bench") for name, what in services.items()])))
"""


@dataclass(frozen=True, slots=True)
class MinivmPeer(Peer):
    root: Path = ROOT

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        specs, before = {}, ""
        for name, command in services.items():
            mapping: dict[str, object] = {"command": [part.replace("$", "$$") for part in command]}
            mapping["restart"] = {"window": "50ms"}
            if chain:
                mapping |= {"ready": {"file": after(name, directory)}, "needs": [before] if before else []}
            specs[name] = mapping
            before = name
        plan = directory / "plan.json"
        made = [sys.executable, "-c", COMPILE]
        done = subprocess.run(made, cwd=self.root, input=json.dumps(specs), capture_output=True, text=True, check=True)
        plan.write_text(done.stdout)
        return [PYTHON, "-I", "-S", "-Xutf8", str(self.root / "init/__main__.py"), "--plan", str(plan)]


class Floor(Peer):
    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if chain:
            return None
        plan = directory / "floor.json"
        plan.write_text(json.dumps(dict(services)))
        return [PYTHON, "-I", "-S", str(ROOT / "bench/init_floor.py"), str(plan)]


class Supervisord(Peer):
    def available(self) -> bool:
        return self._command() is not None

    def _command(self) -> str | None:
        beside = Path(sys.executable).with_name("supervisord")
        return str(beside) if beside.exists() else shutil.which("supervisord")

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if chain:
            return None  # it has no order
        text = "[supervisord]\nnodaemon=true\nuser=root\n"
        text += f"logfile=/dev/null\nlogfile_maxbytes=0\npidfile={directory}/pid\nchildlogdir={directory}\n"
        for name, command in services.items():
            script = directory / f"{name}.sh"
            script.write_text("#!/bin/sh\n" + command[2] + "\n" if command[0] == "/bin/sh" else quoted(command))
            script.chmod(0o755)
            text += f"[program:{name}]\ncommand={script}\nautorestart=true\nstartretries=1000\n"
            text += "stdout_logfile=/dev/fd/1\nstdout_logfile_maxbytes=0\n"
        config = directory / "supervisord.conf"
        config.write_text(text)
        return [str(self._command()), "-c", str(config)]


def quoted(command: list[str]) -> str:
    import shlex

    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


class S6(Peer):
    def available(self) -> bool:
        return shutil.which("s6-svscan") is not None

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        scan = directory / "scan"
        before = ""
        for name, command in services.items():
            service = scan / name
            service.mkdir(parents=True, exist_ok=True)
            lines = ["#!/bin/sh"]
            if chain:  # ordering is s6-rc's; by hand it is a wait for the one before
                (service / "notification-fd").write_text("3\n")
                # It may look before the other's supervisor is there, and would give up.
                wait = f"until s6-svwait -U {scan}/{before} 2>/dev/null; do sleep 0.002; done"
                lines += [wait] if before else []
            lines.append(command[2] if command[0] == "/bin/sh" else quoted(command).splitlines()[1])
            (service / "run").write_text("\n".join(lines) + "\n")
            (service / "run").chmod(0o755)
            before = name
        return ["s6-svscan", str(scan)]


class Reaper(Peer):
    """A reaper such as tini or dumb-init: one child, and orphans."""

    def available(self) -> bool:
        return shutil.which(self.name) is not None

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if len(services) != 1:
            return None
        return [self.name, "--", *next(iter(services.values()))]


BEFORE = os.environ.get("BENCH_BEFORE", "")
PEERS: tuple[Peer, ...] = (
    MinivmPeer("init"),
    *((MinivmPeer("init before", Path(BEFORE).resolve()),) if BEFORE else ()),
    Floor("bare Python loop"),
    Supervisord("supervisord"),
    S6("s6"),
    Reaper("tini"),
    Reaper("dumb-init"),
)
