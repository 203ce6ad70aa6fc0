"""A real PID 1 in a PID namespace of its own, with real services: what the process tests stand on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from init.plan.compile import compile_plan, plan_to_json
from init.plan.spec import parse_drain, parse_service
from init.pod.client import Client
from init.view.status import ServiceView, Snapshot
from tests.support.ports import free_port
from tests.waiting import PATIENCE, until

# The system's own where there is one: services that are not root must be able to run it.
SYSTEM_PYTHON = Path("/usr/bin/python3")
PYTHON = str(SYSTEM_PYTHON) if SYSTEM_PYTHON.exists() else sys.executable
T = TypeVar("T")

# The beginning of every helper service: how to tell PID 1 something, and how to say a line in one write, where two
# processes share a pipe (unbuffered, Python's own writes every word alone, and the other's come in between).
TELL = """
import os, signal, socket, sys, time
def print(*words, sep=" "):
    os.write(1, (sep.join(map(str, words)) + "\\n").encode())
def tell(text):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
"""


def python(code: str) -> list[str]:
    """Build a service in Python that starts as lightly as possible."""
    return [PYTHON, "-I", "-S", "-u", "-c", (TELL + code).replace("$", "$$")]


def shell(code: str) -> list[str]:
    return ["/bin/sh", "-c", code.replace("$", "$$")]


NOTIFIES = python("tell('READY=1'); signal.pause()")


class World:
    """One pod: its plan, its PID 1, and the ways to look at it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = Path(tempfile.mkdtemp(prefix="minivm-run-"))  # not below pytest's, which other users cannot enter
        self.run.chmod(0o755)
        self.out = directory / "out"
        self.plan = directory / "plan.json"
        self.last_words = directory / "termination-log"
        self.last_words.touch()
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def write_plan(self, services: Mapping[str, dict[str, Any]], drain: dict[str, Any] | None = None) -> None:
        found = [parse_service(name, mapping, f"{name}.yaml") for name, mapping in services.items()]
        plan = compile_plan("test", found, parse_drain(drain, "drain.yaml") if drain else None)
        self.plan.write_text(plan_to_json(plan))

    def start(
        self,
        services: Mapping[str, dict[str, Any]] | None = None,
        drain: dict[str, Any] | None = None,
        *,
        grace: float = 10,
        stdout: Any = None,
        entry: list[str] | None = None,
        network: bool = False,
        booted: int = 0,
        **env: str,
    ) -> World:
        if services is not None:
            self.write_plan(services, drain)
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *(["--net"] if network else [])]
        unshare += ["--time", f"--boottime={booted}"] if booted else []
        command = [*unshare, sys.executable, *(entry or ["-I", "-m", "init"]), "--plan", str(self.plan)]
        own = {
            "PATH": os.environ["PATH"],
            "MINIVM_RUN": str(self.run),
            "MINIVM_HTTP": f"127.0.0.1:{self.port}",
            "MINIVM_SYSLOG": str(self.directory / "log"),
            "MINIVM_GRACE_SECONDS": str(grace),
            "MINIVM_TERMINATION_LOG": str(self.last_words),
        }
        if stdout is None:
            with self.out.open("ab") as stream:
                self.process = subprocess.Popen(command, env=own | env, stdout=stream, stderr=stream)
        else:
            self.process = subprocess.Popen(command, env=own | env, stdout=stdout, stderr=stdout)
        return self

    # Looking.

    @property
    def pid(self) -> int:
        """PID 1's number out here."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(self.until(lambda: children.read_text().split()[:1], "PID 1 is there")[0])

    def client(self) -> Client:
        path = self.run / "control.sock"
        self.until(path.exists, "the control socket is there")
        return Client(path, within=PATIENCE)

    def ask(self, op: str, **keys: Any) -> dict[str, Any]:
        with self.client() as client:
            return client.request(op, **keys)

    def snapshot(self) -> Snapshot:
        with self.client() as client:
            return client.snapshot()

    def service(self, name: str) -> ServiceView:
        return next(view for view in self.snapshot().services if view.name == name)

    def events(self, name: str) -> list[str]:
        return [item["event"] for item in self.ask("trace")["events"] if item["service"] == name]

    def get(self, path: str, within: float = PATIENCE) -> tuple[int, str]:
        self.until((self.run / "control.sock").exists, "PID 1 serves")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=within) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wakeups(self) -> int:
        """Count how often PID 1 gave up the processor voluntarily: an idle one does not."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("voluntary_ctxt")))

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def output(self) -> str:
        return self.out.read_text(errors="replace")

    # Waiting.

    def until(self, look: Callable[[], T], what: str) -> T:
        """With what PID 1 has said, should it be in vain."""
        return until(look, what, seen=lambda: self.output()[-3000:] if self.out.exists() else "")

    def until_ready(self) -> Snapshot:
        self.until(lambda: self.snapshot().ready, "the pod is ready")
        return self.snapshot()

    def until_state(self, name: str, state: str) -> ServiceView:
        self.until(lambda: self.service(name).state == state, f"{name} is {state}")
        return self.service(name)

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE)

    def term(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> int:
        self.term()
        return self.ended()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # --kill-child takes PID 1, and the kernel the rest of its namespace
            self.process.wait(PATIENCE)
        shutil.rmtree(self.run, ignore_errors=True)


@contextlib.contextmanager
def world(directory: Path) -> Iterator[World]:
    made = World(directory)
    try:
        yield made
    finally:
        made.close()
