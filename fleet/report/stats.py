"""What the fleet has seen and done, for its probes and for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.act.api_client import ApiClient
from fleet.act.leader_election import Leader
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Change, Notice
from fleet.report.web import HttpServer
from fleet.world.snapshot import Snapshot, Unknown
from ground.metrics import family

# Whoever does not come round for so long hangs: a pass asks two servers, and each has its deadlines.
HANGS_S = 300.0


@dataclass(slots=True)
class LoopStats:
    turned: float  # monotonic: when something was last looked at or done
    leader: bool = False
    heard: bool = False  # of the Lease
    kubernetes: str = "not asked yet"  # why nothing is known; "": it is known
    slurm: str = ""  # asked by the leader alone
    mistake: str = ""  # of ours, for which nothing is decided
    workers: int = 0
    done: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    stands: Counter[str] = field(default_factory=Counter)
    apart: Mapping[str, float] = field(default_factory=dict)  # by how much our clock is ahead of another

    def looked(self, world: Snapshot, stands: tuple[Notice, ...], mistake: str = "") -> None:
        self.mistake = mistake
        self.slurm = world.slurm.why if isinstance(world.slurm, Unknown) else ""
        self.workers = 0 if isinstance(world.kubernetes, Unknown) else len(world.kubernetes.pods)
        self.stands = Counter(one.kind for one in stands)

    def alive(self, now: float) -> tuple[int, str]:
        silent = now - self.turned
        return (200, "ok\n") if silent < HANGS_S else (503, f"nothing was looked at for {silent:.0f} s\n")

    def ready(self) -> tuple[int, str]:
        """Slurm is not among it: a fleet that waits for its controller is not mended by another one. A mistake of ours
        is: another release may be without it, and a roll to one that has it stops there."""
        if self.kubernetes:
            return 503, f"Kubernetes is not known: {self.kubernetes}\n"
        if not self.heard:
            return 503, "the Lease is not known\n"
        if self.leader and self.mistake:
            return 503, f"{self.mistake}\n"
        return 200, f"{'acts' if self.leader else 'waits for the Lease'}\n"

    def metrics(self) -> str:
        known = [({"side": "kubernetes"}, "01"[not self.kubernetes])]
        known += [({"side": "slurm"}, "01"[not self.slurm])] if self.leader else []
        lines = family("minivm_fleet_leader", "1: this one acts.", [({}, "01"[self.leader])])
        lines += family("minivm_fleet_known", "0: of this side nothing is known, and nothing is done.", known)
        if self.leader:
            said = "0: for a mistake of the fleet's nothing is, and nothing is done."
            lines += family("minivm_fleet_decided", said, [({}, "01"[not self.mistake])])
        lines += family("minivm_fleet_workers", "Worker pods.", [({}, str(self.workers))])
        lines += family("minivm_fleet_stands", "What is told and not done, by kind.", _each("kind", self.stands))
        ahead = [({"of": who}, f"{by:.0f}") for who, by in sorted(self.apart.items())]
        lines += family("minivm_fleet_clock_ahead_seconds", "By how much its clock is ahead, at least.", ahead)
        for name, about, of in (
            ("changes", "Changes that were made.", self.done),
            ("late", "Changes that came too late for what they were decided on, and did nothing.", self.late),
            ("failures", "Changes that were refused or not answered.", self.failed),
        ):
            lines += family(f"minivm_fleet_{name}_total", about, _each("action", of), "counter")
        return "\n".join(lines) + "\n"


def pages(seen: LoopStats, leader: Leader, cache: WatchCache, api: ApiClient) -> HttpServer:
    """What is known without looking is asked for at each request."""

    def ready() -> tuple[int, str]:
        seen.heard, seen.leader = leader.heard, leader.holds()
        seen.kubernetes, seen.apart = cache.unknown(), api.clocks.apart
        return seen.ready()

    def metrics() -> tuple[int, str]:
        ready()
        return 200, seen.metrics()

    return HttpServer({"/livez": lambda: seen.alive(time.monotonic()), "/readyz": ready, "/metrics": metrics})


def _each(label: str, counted: Counter[str]) -> list[tuple[dict[str, str], str]]:
    return [({label: key}, str(count)) for key, count in sorted(counted.items())]


def name_of(change: Change) -> str:
    return type(change).__name__.lower()
