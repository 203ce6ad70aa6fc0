"""Machines that a pool gives to pods of others that find no room, by policy: idle ones first, busy ones with notice.

What is lent stands in Slurm: its node is drained by us for that, also while it has no pod. So nothing is remembered,
and a machine whose drain somebody lifts is the pool's again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from fleet import words
from fleet.decide.actions import Tell
from fleet.decide.causes import LEAVE, LEND, late, well
from fleet.decide.gone import lent as is_lent
from fleet.decide.pools.turns import held_by_others
from fleet.policy import Policy
from fleet.world.guests import Amounts, Guest, holds, less
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import stamp
from fleet.world.pool import WorkerPool
from fleet.world.slurm import Slurm
from fleet.world.world import Worker

NAMED = 5
# So many are looked after at a time: who makes thousands, each another one, keeps nobody from an answer.
ASK = 256


@dataclass(frozen=True, slots=True)
class Lent:
    """The pods that go, or do not come, and for whom; by name."""

    to: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tells: tuple[Tell, ...] = ()
    may: bool = False  # whether it lends at all

    @property
    def words(self) -> str:
        more = f" and {len(self.to) - NAMED} more" if len(self.to) > NAMED else ""
        return "; ".join(f"{name} to {self.to[name]}" for name in sorted(self.to)[:NAMED]) + more


NONE = Lent()


def lent(
    pool: WorkerPool, everyone: Iterable[Worker], kubernetes: Kubernetes, slurm: Slurm, now: float, policy: Policy
) -> Lent:
    share = policy.lend.pools.get(pool.label)
    names = kubernetes.wanted.get(pool.name, {})
    before = [name for name in names if (node := slurm.nodes.get(name)) and is_lent(node)]
    if share is None:
        return NONE
    if pool.selector is None:
        return Lent(tells=(Tell(pool.name, LEND, "lends no machine: only a pool of mode perNode does"),))
    if kubernetes.guests is None:
        # What they ask for is not known: nothing is begun, and nothing given back.
        found = dict.fromkeys(before, "whoever wanted it")
        return Lent(found, {name: {LEND: f"wanted by {to}"} for name, to in found.items()}, may=True)
    workers = {one.name: one for one in everyone if one.name in names}
    table = Table(pool, names, workers, kubernetes, slurm, now, policy)
    asked = sorted((one for one in kubernetes.guests if table.asks(one)), key=lambda one: (one.created, one.name))
    table.seat(before, asked, int(share * len(names)), begin=policy.lend.notice_s < inf)
    to = {name: _few(found) for name, found in table.taken.items()}
    causes = {name: _causes(workers[name], to[name], now, policy) for name in to if name in workers}
    tells = [
        Tell(name, LEND, causes[name][LEND]) if name in causes else Tell(names[name], LEND, f"is lent to {who}")
        for name, who in sorted(to.items())
    ]
    return Lent(to, causes, tuple(tells), may=True)


class Table:
    """Who is given which machine."""

    def __init__(
        self,
        pool: WorkerPool,
        names: Mapping[str, str],
        workers: Mapping[str, Worker],
        kubernetes: Kubernetes,
        slurm: Slurm,
        now: float,
        policy: Policy,
    ) -> None:
        self.pool, self.names, self.workers = pool, names, workers
        self.kubernetes, self.slurm, self.now, self.policy = kubernetes, slurm, now, policy
        self.classes = frozenset(policy.lend.classes)
        self.on: dict[str, list[Guest]] = {}
        for one in kubernetes.guests or ():
            if one.node:
                self.on.setdefault(one.node, []).append(one)
        self.taken: dict[str, list[Guest]] = {}

    def asks(self, one: Guest) -> bool:
        return one.waits and one.class_ in self.classes

    def seat(self, before: Iterable[str], asked: Iterable[Guest], most: int, *, begin: bool) -> None:
        for name in before:
            here = [one for one in self.on.get(self.names[name], ()) if one.class_ in self.classes]
            if here and name not in self.workers:
                self.taken[name] = here
        held = frozenset(before)
        may_go = [name for name in self.names if begin and name not in held and self._may_go(name)]
        order = sorted([*held, *may_go], key=lambda name: self._rank(name, name in held))
        order = [name for name in order if well(self.kubernetes.nodes[self.names[name]], self.policy, self.now)]
        room = {name: self._room(name) for name in order}
        hopeless: set[object] = set()
        # Room gets less only: who finds none now finds none later.
        for one in islice((one for one in asked if one.shape not in hopeless), ASK):
            # What is given back in this moment counts, too.
            full, closed = len(self.taken) >= most, len(held | self.taken.keys()) >= most
            may = (name for name in order if name in self.taken or not (full if name in held else closed))
            found = next((name for name in may if self._fits(one, name, room[name])), "")
            if not found:
                hopeless.add(one.shape)
                continue
            room[found] = less(room[found], one.requests)
            self.taken.setdefault(found, []).append(one)

    def _rank(self, name: str, held: bool) -> tuple[int, bool, str]:
        """What is empty already, then what is idle, also in place of what is held and busy still."""
        worker, node = self.workers.get(name), self.slurm.nodes.get(name)
        busy = node is not None and (node.record.busy or bool(self.slurm.holding(name)))
        return (0 if worker is None else 1 + busy), not held, name

    def _may_go(self, name: str) -> bool:
        """It takes jobs, it is ours, and nobody says anything of it."""
        worker = self.workers.get(name)
        if worker is None or worker.slurm is None or worker.pod.owner != self.pool.uid:
            return False
        node, pod = worker.slurm, worker.pod
        usual = pod.ready and not (pod.deleting or pod.ended or node.drained or node.down or LEAVE in pod.annotations)
        return usual and node.record.responds and not held_by_others(node, LEND) and bool(self.pool.most)

    def _room(self, name: str) -> Amounts:
        node = self.names[name]
        return less(self.kubernetes.nodes[node].room, *(one.requests for one in self.on.get(node, ())))

    def _fits(self, one: Guest, name: str, room: Amounts) -> bool:
        node, worker = self.kubernetes.nodes[self.names[name]], self.workers.get(name)
        taints = [(taint.key, taint.value, taint.effect) for taint in node.taints]
        if not holds(room, one.requests) or not one.suits(node.name, node.labels, taints):
            return False
        # Where it would fit beside our pod, something else keeps it away.
        return worker is None or not holds(less(room, worker.pod.requests), one.requests)


def _causes(worker: Worker, to: str, now: float, policy: Policy) -> Mapping[str, str]:
    node, notice = worker.slurm, policy.lend.notice_s
    if node is not None and node.runs and late(worker.pod, node, {LEND}, notice, now):
        return {LEND: f"wanted by {to}", "deadline": f"its jobs had {notice:g} s"}
    if node is None or notice == inf or "deadline" in words.kinds(node.reason):
        return {LEND: f"wanted by {to}"}
    return {LEND: f"wanted by {to} at {stamp(int((node.since if is_lent(node) else now) + notice))}"}


def _few(guests: list[Guest]) -> str:
    more = f" and {len(guests) - 1} more" if len(guests) > 1 else ""
    return f"{guests[0].name} of class {guests[0].class_}{more}"
