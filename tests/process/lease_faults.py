"""Two controllers under load and a random sequence of faults, from a seed; then a check of what they acknowledged.

Clients submit to the stand-ins for slurmctld of both pods all the time. The faults overlap: a frozen pod, a stopped or
killed process, a pod that dies or ends, both pods at once, a hand-over, a cut network. The boot clocks of the pods
differ by days. Where file systems can be mounted, the volume hangs, for both pods or for one, or is full.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from init.errors import InitError
from init.slurm import lost_jobs
from init.state import hand_over, lease
from tests.process.init_two import STAND_IN, Two, answer, connect, of_host, processes
from tests.waiting import until

PROBLEMS = ("lost", "twice", "reused", "two writers", "stuck")
# A pod whose network is cut does not reach the volume; of a submission either the request or the answer is lost.
NETWORK = ("requests cut", "answers cut")
OF_VOLUME = ("volume hangs", "volume full", *NETWORK)
KINDS = ("freeze", "freeze", "freeze", "stop", "kill", "pod dies", "pod ends", "hand over", *OF_VOLUME)
ACTS, BOTH = -1, 2  # the pod that acts when the fault begins; both
PODS = (ACTS, ACTS, 0, 1, BOTH)
SERVICES = ("pid 1", "lease", "slurmctld")
CLIENTS = 3  # of each pod
TIMELINE_S = 12.0
# Shorter than a lease; longer, and shorter than a client waits; longer than that.
LASTS_S = ((0.2, 7.0), (8.0, 14.0), (21.0, 24.0))
BOOTED_S = (0, 500_000)  # before the start of each pod, by its boot clock
WAKES_S = 0.1  # from one process to the next
VOLUME = 512 << 20  # sparse; lost jobs are kept while 256 MiB are free
# A pod may be where none of this can be done: its processes have ended, or do not answer.
GONE = (OSError, StopIteration, InitError, AssertionError)


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    pod: int
    service: str
    lasts: float


@dataclass
class Outcome:
    seed: int
    faults: list[Fault]
    terms: int = 0
    gap: float = 0.0  # the longest time without a submission
    acknowledged: dict[str, int] = field(default_factory=dict)  # text -> number
    brought_back: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of each kind of problem


def sequence(seed: int, *, hangs: bool) -> list[Fault]:
    """Return the faults of a seed in the order of their beginnings."""
    numbers = random.Random(seed)
    faults = [
        Fault(
            numbers.uniform(0.0, TIMELINE_S), numbers.choice(KINDS), numbers.choice(PODS), numbers.choice(SERVICES),
            numbers.uniform(*numbers.choice(LASTS_S)),
        )
        for _ in range(numbers.randint(2, 4))
    ]  # fmt: skip
    return sorted((each for each in faults if hangs or each.kind not in OF_VOLUME), key=lambda each: each.at)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name, suppress(OSError, subprocess.CalledProcessError), volume(Path(name)):
        return True
    return False


@contextmanager
def volume(directory: Path) -> Iterator[Volume]:
    """Mount a file system of its own, which can be frozen, and for each pod a way to it, which can be stopped."""
    image, mounted = directory / "image", directory / "mounted"
    with image.open("wb") as stream:
        stream.truncate(VOLUME)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    with ExitStack() as stack:
        stack.enter_context(mount(mounted, "mount", "-o", "loop", str(image)))
        state = mounted / "state"
        state.mkdir()
        ways = [directory / f"way-{pod}" for pod in (0, 1)]
        servers = [stack.enter_context(mount(way, "bindfs", "-f", "--multithreaded", str(state))) for way in ways]
        yield Volume(mounted, state, ways, [server.pid for server in servers])


@contextmanager
def mount(place: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    place.mkdir()
    with subprocess.Popen([*command, str(place)], stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: place.is_mount() or process.poll(), f"{command[0]} mounts {place}", within=120)
            if not place.is_mount():
                raise OSError(f"{command[0]} cannot mount {place}")
            yield process
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
            # The pods of other sequences have this mount, too, and it would last as long as they do.
            process.kill()


@dataclass(frozen=True)
class Volume:
    mounted: Path
    state: Path
    ways: list[Path]  # of each pod
    servers: list[int]  # the process behind each way

    def put(self, *, full: bool, hangs: bool) -> None:
        """Fill or empty the volume, which needs one that does not hang, then have it hang or not."""
        self._freeze("-u")
        if full:
            with (self.mounted / "full").open("ab") as stream, suppress(OSError):
                room = os.fstatvfs(stream.fileno())  # for the file's own blocks there is no room
                os.posix_fallocate(stream.fileno(), stream.tell(), room.f_bavail * room.f_frsize)
        else:
            (self.mounted / "full").unlink(missing_ok=True)
        if hangs:
            self._freeze("-f")

    def _freeze(self, how: str) -> None:
        subprocess.run(["fsfreeze", how, str(self.mounted)], check=False, capture_output=True)


class Sequence:
    """One sequence of faults."""

    def __init__(
        self, seed: int, directory: Path, stack: ExitStack, faults: list[Fault], *, hangs: bool
    ) -> None:  # fmt: skip
        self.outcome = Outcome(seed, faults)
        self.order = random.Random(seed)
        self.volume = stack.enter_context(volume(directory)) if hangs else None
        state, ways = (self.volume.state, self.volume.ways) if self.volume else (None, None)
        booted = [self.order.randint(*BOOTED_S) for _ in (0, 1)]
        self.two = Two(directory, stack, STAND_IN, base=state, ways=ways, booted=booted)
        self.lasting: Counter[tuple[str, int]] = Counter()  # faults of the volume and of the network, by pod
        self.enough = threading.Event()
        stack.callback(self.enough.set)
        self.lock = threading.Lock()
        self.acknowledged: list[tuple[str, int]] = []
        self.times: list[float] = []
        stack.callback(self.heal)

    def run(self) -> Outcome:
        self.two.start(0)
        self.two.submit(0, "first")
        self.two.start(1)
        clients = [
            threading.Thread(target=self.submit, args=(pod, client), daemon=True)
            for pod in (0, 1) for client in range(CLIENTS)
        ]  # fmt: skip
        for client in clients:
            client.start()
        self.break_things()
        self.heal()
        until(self.is_whole, f"seed {self.outcome.seed}: one acts, one stands by", seen=self.two.seen)
        self.enough.set()
        for client in clients:
            client.join()
        active = until(self.is_whole, "one acts", seen=self.two.seen) - 1
        self.two.submit(active, "last")
        self.two.until_saved("last")
        until(self.is_back, "lost jobs are back", seen=self.two.seen)
        self.check()
        return self.outcome

    def submit(self, pod: int, client: int) -> None:
        number = 0
        while not self.enough.is_set():
            number += 1
            text = f"{pod}-{client}-{number}"
            with suppress(OSError):
                if self.lasting["requests cut", pod]:
                    raise ConnectionError("cut")
                job = answer(connect(self.two.address(pod), text))
                with self.lock:
                    if self.lasting["answers cut", pod]:
                        continue
                    if job:
                        self.acknowledged.append((text, job))
                        self.times.append(time.monotonic())
                    else:
                        self.outcome.refused += 1
            time.sleep(0.05)

    # The faults.

    def break_things(self) -> None:
        begun = time.monotonic()
        events: list[tuple[float, Callable[[], None]]] = []
        for fault in self.outcome.faults:
            events.append((fault.at, lambda fault=fault: events.extend(self.begin(fault))))  # type: ignore[misc]
        while events:
            events.sort(key=lambda event: event[0])
            at, act = events.pop(0)
            time.sleep(max(0.0, begun + at - time.monotonic()))
            with suppress(*GONE):
                act()

    def begin(self, fault: Fault) -> list[tuple[float, Callable[[], None]]]:
        """Begin a fault, and return what ends it."""
        if fault.pod == BOTH:
            return [end for pod in (0, 1) for end in self.begin(replace(fault, pod=pod))]
        ends = fault.at + fault.lasts
        if fault.pod == ACTS:
            newest = lease.Terms(self.two.base).newest()
            fault = replace(fault, pod=int(newest is not None and newest.holder.endswith("-1")))
        with suppress(*GONE):
            return [(ends, end) for end in self.breaks(fault)]
        return []

    def breaks(self, fault: Fault) -> list[Callable[[], None]]:
        pod = self.two.pods[fault.pod]
        if fault.kind in OF_VOLUME:
            self.spoil(fault.kind, fault.pod, begins=True)
            return [lambda: self.spoil(fault.kind, fault.pod, begins=False)]
        if fault.kind in ("freeze", "stop"):
            pids = processes(pod) if fault.kind == "freeze" else [self.process(fault)]
            signal_all(pids, signal.SIGSTOP)
            return [lambda: self.wake(pids)]
        if fault.kind == "kill" and fault.service != "pid 1":
            os.kill(self.process(fault), signal.SIGKILL)
        elif fault.kind in ("kill", "pod dies"):
            self.end_pod(fault.pod)
            return [lambda: self.start_pod(fault.pod)]
        elif fault.kind == "pod ends":
            pod.term()
            return [lambda: self.start_pod(fault.pod)]
        elif fault.kind == "hand over":
            self.hand_over(fault.pod)
        return [lambda: None]  # the clients go on meanwhile

    def spoil(self, kind: str, pod: int, *, begins: bool) -> None:
        """Begin or end a fault of the volume or the network; several may last at once."""
        self.lasting[kind, pod] += 1 if begins else -1
        assert self.volume
        if kind in NETWORK:
            cut = any(self.lasting[each, pod] for each in NETWORK)
            signal_all([self.volume.servers[pod]], signal.SIGSTOP if cut else signal.SIGCONT)
        else:
            full, hangs = (any(self.lasting[each, of] for of in (0, 1)) for each in ("volume full", "volume hangs"))
            self.volume.put(full=full, hangs=hangs)

    def wake(self, pids: list[int]) -> None:
        """Wake processes in any order, as on a busy machine."""
        self.order.shuffle(pids)
        for pid in pids:
            signal_all([pid], signal.SIGCONT)
            time.sleep(self.order.uniform(0.0, WAKES_S))

    def process(self, fault: Fault) -> int:
        pod = self.two.pods[fault.pod]
        return pid_1(pod) if fault.service == "pid 1" else of_host(pod, fault.service)

    def end_pod(self, number: int) -> None:
        process = self.two.pods[number].process
        assert process is not None
        process.kill()
        process.wait()

    def start_pod(self, number: int) -> None:
        """Start a pod that has ended, as a new container: with nothing of its own."""
        process = self.two.pods[number].process
        if process is not None and process.poll() is None:
            self.end_pod(number)
        own = self.two.pods[number].directory / "own"
        for file in own.iterdir():
            file.unlink()
        self.two.start(number)

    def hand_over(self, number: int) -> None:
        newest = lease.Terms(self.two.base).newest()
        assert newest is not None
        heir = f"slurm-controller-{1 - number}"
        request = {"heir": heir, "term": newest.number, "until": self.two.clock(number) + 10}
        (self.two.pods[number].directory / "own" / Path(hand_over.REQUEST).name).write_text(json.dumps(request))
        threading.Thread(target=self.restart_lease, args=(number,), daemon=True).start()

    def restart_lease(self, number: int) -> None:
        with suppress(*GONE):
            time.sleep(0.5)  # the holder announces its heir meanwhile
            self.two.pods[number].ask("restart", service="lease", bound=True, wait=False)

    def heal(self) -> None:
        """End every fault. Safe to repeat."""
        for (kind, of_pod), count in list(self.lasting.items()):
            for _ in range(count):
                self.spoil(kind, of_pod, begins=False)
        for number, pod in enumerate(self.two.pods):
            if pod.process is None:
                continue
            with suppress(*GONE):
                signal_all(processes(pod), signal.SIGCONT)
            if pod.process.poll() is not None and not self.enough.is_set():
                self.start_pod(number)

    # The end.

    def is_whole(self) -> int:
        """Return the number of the pod that acts, counted from 1; 0 while there is not one, with a standby."""
        with suppress(*GONE):
            turns = self.two.turns()
            acts = [number for number, turn in enumerate(turns, 1) if turn.startswith("active")]
            if len(acts) == 1 and "standby" in turns and answer(connect(self.two.address(acts[0] - 1), "probe")):
                return acts[0]
        return 0

    def is_back(self) -> bool:
        kept = lost_jobs.entries(self.two.base / lost_jobs.LOST.lstrip("/"))
        numbers = {*self.two.jobs(), *(lost.job for lost in kept)}  # a second submission may be lost, too
        # A frozen controller that wakes may write `refused` over `back`: `check` looks for the job itself.
        return all(lost.state == "refused" or (lost.state == "back" and lost.back_as in numbers) for lost in kept)

    def check(self) -> None:
        outcome, records = self.outcome, self.two.jobs()
        outcome.acknowledged = dict(self.acknowledged)
        outcome.gap = max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)
        outcome.terms = lease.terms(self.two.base / "lease")[-1]
        outcome.brought_back = sum(bool(again) for _, again in records.values())
        texts = Counter(text for text, _ in records.values() if text != "probe")
        given = Counter(number for _, number in self.acknowledged)
        self.report("lost", [f"{text} ({number})" for text, number in self.acknowledged if not texts[text]])
        self.report("twice", [text for text, count in texts.items() if count > 1])
        self.report("reused", [
            f"{number}: {text}" for text, number in self.acknowledged
            if given[number] > 1 or (number in records and records[number][0] != text)
        ])  # fmt: skip
        writers: dict[str, set[str]] = {}
        for line in self.two.out.read_text().splitlines():
            term, _, pod = line.split()
            writers.setdefault(term, set()).add(pod)
        self.report("two writers", [f"term {term}" for term, pods in writers.items() if len(pods) > 1])

    def report(self, kind: str, found: list[str]) -> None:
        self.outcome.counts[kind] += len(found)
        if found:
            self.outcome.problems.append(f"{kind}: {', '.join(found[:5])}")


def pid_1(pod: object) -> int:
    return processes(pod)[0]  # type: ignore[arg-type]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run(seed: int, *, hangs: bool, faults: list[Fault] | None = None) -> Outcome:
    """Run the faults, by default those of the seed."""
    faults = sequence(seed, hangs=hangs) if faults is None else faults
    directory = Path(tempfile.mkdtemp(prefix="minivm-faults-"))
    try:
        with ExitStack() as stack:
            return Sequence(seed, directory, stack, faults, hangs=hangs).run()
    except (AssertionError, OSError) as error:
        return Outcome(seed, faults, problems=[str(error)], counts=Counter(stuck=1))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
