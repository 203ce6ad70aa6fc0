"""Two controllers' lease services under two real PID 1 on one volume: one writer at a time, whatever is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from init.state.lease import Terms
from tests.process.init_world import World, python, world
from tests.waiting import until

pytestmark = pytest.mark.root

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


class Two:
    """Two pods that share a volume."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.base, self.out = directory / "volume", directory / "writes"
        self.base.mkdir()
        (self.base / "job_state").write_text("jobs")
        self.pods = []
        for number in (0, 1):
            (directory / f"{number}/own").mkdir(parents=True)
            self.pods.append(stack.enter_context(world(directory / str(number))))

    def start(self, number: int) -> World:
        own = self.pods[number].directory / "own"
        held = str(own / "lease.json")
        module = [sys.executable, "-I", "-m"]
        services: dict[str, dict[str, Any]] = {
            "lease": {
                "command": [*module, "init.helpers.lease", str(self.base), str(own)],
                "ready": "notify", "watchdog": "4s", "restart": {"delay": "500ms"}, "stop": {"grace": "5s"},
            },
            "slurmctld": {"command": python(WRITER), "ready": "notify", "bound-to": ["lease"]},
        }  # fmt: skip
        return self.pods[number].start(
            services, MINIVM_POD_NAME=f"slurm-controller-{number}", HELD=held, OUT=str(self.out), BASE=str(self.base)
        )

    def writes(self) -> dict[int, list[float]]:
        """Return the times at which each term was written."""
        found: dict[int, list[float]] = {}
        for line in self.out.read_text().splitlines() if self.out.exists() else ():
            term, _, at = line.partition(" ")
            found.setdefault(int(term), []).append(float(at))
        return found

    def until_written(self, term: int) -> None:
        until(lambda: len(self.writes().get(term, ())) > 20, f"term {term} writes", seen=self.seen)

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


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(tmp_path, stack).started()


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


def test_the_standby_is_ready_and_says_for_whom_it_waits(two: Two) -> None:
    view = two.pods[1].until_ready()
    assert view.turn == "standby: slurm-controller-0 has term 1"
    assert two.pods[1].get("/readyz")[0] == 200
    assert two.pods[0].until_ready().turn == "active, term 1"
    assert two.pods[1].service("slurmctld").starts == 0


def test_a_pod_that_stops_hands_over_at_once(two: Two) -> None:
    begun = now()
    two.pods[0].stop()
    two.until_written(2)
    assert two.overlaps() == [] and min(two.writes()[2]) - begun < 8
    assert (two.base / "term-2/job_state").read_text() == "jobs"


def ask_for_a_hand_over(two: Two, heir: str) -> None:
    request = two.pods[0].directory / "own/hand-over.json"
    request.write_text(json.dumps({"heir": heir, "term": 1, "until": now() + 30}))
    until(lambda: getattr(Terms(two.base).newest(), "heir", "") == heir, "it is announced", seen=two.seen)
    two.pods[0].ask("restart", service="lease", bound=True, wait=False)


def test_a_hand_over_stops_slurmctld_gently_and_the_heir_acts(two: Two) -> None:
    ask_for_a_hand_over(two, "slurm-controller-1")
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[0].service("slurmctld").last_exit == "killed by TERM"
    two.pods[1].until(lambda: "handed over by slurm-controller-0 in " in two.pods[1].snapshot().turn, "it says how")
    two.pods[0].until(lambda: two.pods[0].snapshot().turn == "standby: slurm-controller-1 has term 2", "it stands by")


def test_a_watcher_hears_that_the_former_controller_is_ready_again(two: Two) -> None:
    ready: list[bool] = []
    replies = two.pods[0].client().stream("watch")  # until its PID 1 ends
    threading.Thread(target=lambda: ready.extend(reply["ready"] for reply in replies), daemon=True).start()
    ask_for_a_hand_over(two, "slurm-controller-1")
    two.pods[0].until(lambda: two.pods[0].snapshot().turn.startswith("standby"), "it stands by")
    two.pods[0].until(lambda: False in ready and ready[-1], "the watcher hears it")


def test_an_heir_that_never_comes_loses_its_right(two: Two) -> None:
    ask_for_a_hand_over(two, "slurm-controller-7")
    two.until_written(2)
    assert two.overlaps() == []


@pytest.mark.parametrize("victim", ["lease", "slurmctld", "pid 1"])
def test_a_process_that_is_killed_during_a_hand_over_changes_nothing(two: Two, victim: str) -> None:
    pid = two.pods[0].pid if victim == "pid 1" else of_host(two.pods[0], victim)
    ask_for_a_hand_over(two, "slurm-controller-1")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    two.until_written(2)
    assert two.overlaps() == []


def test_a_pod_that_dies_is_replaced(two: Two) -> None:
    two.pods[0].close()
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[1].until_ready().turn.partition(":")[0] == "active, term 2"


def test_a_lease_that_is_killed_ends_slurmctld_and_the_same_pod_goes_on_in_a_new_term(two: Two) -> None:
    os.kill(of_host(two.pods[0], "lease"), signal.SIGKILL)
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[0].until_ready().turn.partition(":")[0] == "active, term 2"


def test_a_lease_that_is_stopped_is_given_up_before_another_pod_has_it(two: Two) -> None:
    os.kill(of_host(two.pods[0], "lease"), signal.SIGSTOP)
    two.until_written(2)
    assert two.overlaps() == []
    # PID 1 has begun the service anew: the same pod may be first again, in a term of its own.
    two.pods[0].until(
        lambda: sorted(two.turns()) == ["active, term 2", "standby"], "one is active in term 2, one stands by"
    )


def test_a_stopped_pid_1_does_not_keep_the_lease_from_killing_slurmctld(two: Two) -> None:
    os.kill(two.pods[0].pid, signal.SIGSTOP)
    assert Terms(two.base).claim(2, "slurm-controller-9", "another")
    until(lambda: now() - two.writes()[1][-1] > 1, "slurmctld of pod 0 writes no more", seen=two.seen)
    os.kill(two.pods[0].pid, signal.SIGCONT)
    two.until_written(3)
    assert two.overlaps() == []


def test_a_machine_that_was_suspended_stops_writing_as_soon_as_it_wakes(two: Two) -> None:
    stopped = processes(two.pods[0])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    two.until_written(2)
    assert two.overlaps() == []
    for pid in reversed(stopped):  # PID 1 wakes last
        os.kill(pid, signal.SIGCONT)
    two.pods[0].until(lambda: two.pods[0].snapshot().turn.startswith("standby"), "it stands by")
    late = [at for _, at in two.overlaps()]
    # It wrote into its own term alone, and not for longer than a look at the clock takes.
    assert all(term == 1 for term, _ in two.overlaps())
    assert two.pods[1].until_ready().turn.partition(":")[0] == "active, term 2"
    print(f"{len(late)} writes after waking, within {max(late, default=0) - min(late, default=0):.2f} s")


def test_a_cluster_that_starts_anew_begins_with_its_newest_term(two: Two) -> None:
    for pod in two.pods:
        pod.close()
    two.start(1)
    two.until_written(2)
    assert two.overlaps() == []
