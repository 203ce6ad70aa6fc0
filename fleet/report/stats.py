"""Counts and times of the loop, for the kubelet's probes and for Prometheus."""

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
from fleet.world.controllers import ACTIVE, ControllerPod, controllers
from fleet.world.snapshot import FleetSnapshot, Unknown
from ground.metrics import family

# A loop without a pass for this time hangs: a pass asks two servers, each with its deadlines.
HANGS_S = 300.0


@dataclass(slots=True)
class LoopStats:
    turned: float  # monotonic: the last pass or change
    leader: bool = False
    heard: bool = False  # the Lease could be read
    kubernetes: str = "not asked yet"  # why it is unknown; "": it is known
    slurm: str = ""  # the same; only the leader asks Slurm
    mistake: str = ""  # the bug because of which nothing is decided
    workers: int = 0
    done: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    notices: Counter[str] = field(default_factory=Counter)
    controllers: tuple[ControllerPod, ...] = ()
    apart: Mapping[str, float] = field(default_factory=dict)  # by how much the fleet's clock is ahead of a server's

    def update(self, snapshot: FleetSnapshot, notices: tuple[Notice, ...], mistake: str = "") -> None:
        self.mistake = mistake
        self.slurm = snapshot.slurm.why if isinstance(snapshot.slurm, Unknown) else ""
        self.workers = 0 if isinstance(snapshot.kubernetes, Unknown) else len(snapshot.kubernetes.pods)
        self.notices = Counter(notice.kind for notice in notices)
        kubernetes = snapshot.kubernetes
        self.controllers = () if isinstance(kubernetes, Unknown) else tuple(controllers(kubernetes))

    def alive(self, now: float) -> tuple[int, str]:
        silent = now - self.turned
        return (200, "ok\n") if silent < HANGS_S else (503, f"nothing was looked at for {silent:.0f} s\n")

    def ready(self) -> tuple[int, str]:
        """Answer the readiness probe.

        An outage of Slurm does not count, since another fleet would not end it. A bug does: another release may be
        without it, and a roll-out to a release with it stops.
        """
        if self.kubernetes:
            return 503, f"Kubernetes is not known: {self.kubernetes}\n"
        if not self.heard:
            return 503, "the Lease is not known\n"
        if self.leader and self.mistake:
            return 503, f"{self.mistake}\n"
        return 200, f"{'acts' if self.leader else 'waits for the Lease'}\n"

    def metrics(self) -> str:
        sides = [({"side": "kubernetes"}, "01"[not self.kubernetes])]
        sides += [({"side": "slurm"}, "01"[not self.slurm])] if self.leader else []
        lines = family("minivm_fleet_leader", "1: this fleet acts.", [({}, "01"[self.leader])])
        lines += family("minivm_fleet_known", "0: this side is unknown, and nothing is done.", sides)
        if self.leader:
            about = "0: a bug in the fleet keeps it from deciding, and nothing is done."
            lines += family("minivm_fleet_decided", about, [({}, "01"[not self.mistake])])
        lines += family("minivm_fleet_workers", "Worker pods.", [({}, str(self.workers))])
        lines += self._of_controllers() if self.leader else []
        lines += family("minivm_fleet_stands", "Notices that hold now, by kind.", _samples("kind", self.notices))
        ahead = [({"of": server}, f"{seconds:.0f}") for server, seconds in sorted(self.apart.items())]
        about = "By how much the fleet's clock is ahead, at least."
        lines += family("minivm_fleet_clock_ahead_seconds", about, ahead)
        for name, about, counted in (
            ("changes", "Changes that were made.", self.done),
            ("late", "Changes that did nothing, because the state was no longer as it was seen.", self.late),
            ("failures", "Changes that were refused or not answered.", self.failed),
        ):
            lines += family(f"minivm_fleet_{name}_total", about, _samples("action", counted), "counter")
        return "\n".join(lines) + "\n"

    def _of_controllers(self) -> list[str]:
        """Return the metrics of several controllers; none of a single one, which always acts."""
        known = [each for each in self.controllers if each.role]
        active = [({"pod": each.pod.name}, "01"[each.role == ACTIVE]) for each in known]
        lines = family("minivm_fleet_controller_active", "1: this controller acts, 0: it stands by.", active)
        terms = [({"pod": each.pod.name}, str(each.term)) for each in known if each.role == ACTIVE]
        lines += family("minivm_fleet_controller_term", "The term of the controller that acts.", terms)
        took = [({"pod": each.pod.name}, f"{each.takeover.seconds:.1f}") for each in known if each.takeover]
        about = "How long the last hand-over or take-over took."
        return lines + family("minivm_fleet_controller_takeover_seconds", about, took)


def stats_pages(stats: LoopStats, leader: Leader, cache: WatchCache, api: ApiClient) -> HttpServer:
    """Serve probes and metrics; leadership and Kubernetes are read at each request."""

    def ready() -> tuple[int, str]:
        stats.heard, stats.leader = leader.heard, leader.holds()
        stats.kubernetes, stats.apart = cache.unknown(), api.clocks.apart
        return stats.ready()

    def metrics() -> tuple[int, str]:
        ready()
        return 200, stats.metrics()

    return HttpServer({"/livez": lambda: stats.alive(time.monotonic()), "/readyz": ready, "/metrics": metrics})


def _samples(label: str, counted: Counter[str]) -> list[tuple[dict[str, str], str]]:
    return [({label: key}, str(count)) for key, count in sorted(counted.items())]


def name_of(change: Change) -> str:
    return type(change).__name__.lower()
