"""Two pods with real PID 1, real lease services and a stand-in for slurmctld, on one volume."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ground.files import read_plain
from init.slurm.place import JOBS, WHOLE_HEAD, find_term_directory
from init.state import lease
from tests.process import slurmctld_stand_in
from tests.process.init_world import World, python, world
from tests.waiting import until

# In slurmctld's place: it writes its term and the time, without an end.
WRITER = """
import json
open("/proc/self/comm", "w").write("slurmctld")
term = json.load(open(os.environ["HELD"]))["term"]
out = os.open(os.environ["OUT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
tell("READY=1")
while True:
    assert os.path.isdir(os.environ["BASE"] + f"/term-{term}")
    os.write(out, b"%d %.4f\\n" % (term, time.clock_gettime(time.CLOCK_BOOTTIME)))
    time.sleep(0.01)
"""


# Like slurmctld it answers before it saves.
STAND_IN = [sys.executable, "-I", slurmctld_stand_in.__file__]


def connect(address: Path, text: str, within: float = 20.0) -> socket.socket:
    """Send a submission, as sbatch does: it waits for the answer as long as the chart's MessageTimeout."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(within)
    try:
        connection.connect(str(address))
        connection.sendall(f"{text}\n".encode())
    except OSError:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket) -> int:
    """Return the job's number; 0 if it was refused. OSError if nothing came."""
    with connection:
        text = connection.recv(100).decode().strip()
        if not text:
            raise ConnectionError("it closed the connection")
        return int(text) if text != "refused" else 0


class Two:
    """Two pods that share a volume."""

    def __init__(
        self, directory: Path, stack: ExitStack, slurmctld: list[str] | None = None, *, base: Path | None = None,
        ways: list[Path] | None = None, booted: Sequence[int] = (0, 0),
    ) -> None:  # fmt: skip
        """`slurmctld`: the command in its place; by default one that only writes.

        `base` is the volume, `ways` are the paths by which the pods reach it, and `booted` is added to their boot
        clocks.
        """
        self.slurmctld = slurmctld or python(WRITER)
        self.base, self.out = base or directory / "volume", directory / "writes"
        self.ways, self.booted = ways or [self.base, self.base], booted
        self.base.mkdir(exist_ok=True)
        (self.base / "job_state").write_text("jobs")
        self.pods = []
        for number in (0, 1):
            (directory / f"{number}/own").mkdir(parents=True)
            self.pods.append(stack.enter_context(world(directory / str(number))))

    def start(self, number: int) -> World:
        own = self.pods[number].directory / "own"
        held, way = str(own / "lease.json"), str(self.ways[number])
        module = [sys.executable, "-I", "-m"]
        services: dict[str, dict[str, Any]] = {
            "lease": {
                "command": [*module, "init.helpers.lease", way, str(own)],
                "ready": "notify", "watchdog": "4s", "restart": {"delay": "500ms"}, "stop": {"grace": "5s"},
                "capabilities": [],  # root's may write where a file's mode forbids it
            },
            "slurmctld": {"command": self.slurmctld, "ready": "notify", "bound-to": ["lease"], "capabilities": [],
                          "restart": {"delay": "100ms"}},
        }  # fmt: skip
        return self.pods[number].start(
            services, MINIVM_POD_NAME=f"slurm-controller-{number}", HELD=held, OUT=str(self.out), BASE=way,
            SOCKET=str(self.address(number)), booted=self.booted[number],
        )  # fmt: skip

    def clock(self, number: int) -> float:
        """Return the pod's boot clock."""
        return now() + self.booted[number]

    def address(self, number: int) -> Path:
        return self.pods[number].run / "slurmctld"

    def writes(self) -> dict[int, list[float]]:
        """Return the times at which each term was written."""
        found: dict[int, list[float]] = {}
        for line in self.out.read_text().splitlines() if self.out.exists() else ():
            term, at, *_ = line.split()
            found.setdefault(int(term), []).append(float(at))
        return found

    def until_written(self, term: int) -> None:
        until(lambda: len(self.writes().get(term, ())) > 20, f"term {term} writes", seen=self.seen)

    def jobs(self) -> dict[int, tuple[str, int]]:
        """Return the saved jobs of the newest term: the text of each submission, and the lost job that it replaces."""
        newest = lease.terms(self.base)[-1]
        data = read_plain(find_term_directory(self.base, newest) / JOBS, 64 << 20) or b""
        records = json.loads(data[WHOLE_HEAD:] or b"{}")
        return {int(number): (text, again) for number, (text, again) in records.items()}

    def submit(self, number: int, text: str) -> int:
        until(self.address(number).exists, f"slurmctld of pod {number} listens", seen=self.seen)
        return answer(connect(self.address(number), text))

    def until_saved(self, text: str) -> None:
        until(lambda: any(text == saved for saved, _ in self.jobs().values()), f"{text} is saved", seen=self.seen)

    def turns(self) -> list[str]:
        """Return what each pod is: its term while it is active, or standby."""
        return [pod.snapshot().turn.partition(":")[0] for pod in self.pods]

    def seen(self) -> str:
        return "".join(f"\n{pod.output()[-2000:]}" for pod in self.pods if pod.out.exists())

    def overlaps(self) -> list[tuple[int, float]]:
        """Return the writes of each term that came after the first one of a later term."""
        writes = self.writes()
        return [
            (term, at) for term, times in writes.items() for at in times
            if any(later > term and at > min(others) for later, others in writes.items())
        ]  # fmt: skip

    def started(self) -> Two:
        self.start(0).until_ready()
        self.until_written(1)
        self.start(1)
        self.pods[1].until(lambda: self.pods[1].snapshot().turn.startswith("standby"), "pod 1 stands by")
        return self


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def processes(pod: World) -> list[int]:
    """Return PID 1 and everything below it, the parents first."""
    found, todo = [], [pod.pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def of_host(pod: World, service: str) -> int:
    """Return a service's process as this side numbers it."""
    inside = pod.service(service).pid
    lines = {pid: Path(f"/proc/{pid}/status").read_text() for pid in processes(pod)}
    return next(pid for pid, text in lines.items() if f"NSpid:\t{pid}\t{inside}\n" in text)
