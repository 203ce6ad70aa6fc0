"""Who is given which machine of the pools that lend: idle ones go first, and the namespace that has fewest is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from fleet.decide.causes import LEAVE, LEND, well
from fleet.decide.pools.turns import held_by_others
from fleet.policy import Policy
from fleet.world.guests import Amounts, Guest, holds, less
from fleet.world.kubernetes import Kubernetes
from fleet.world.pool import WorkerPool
from fleet.world.slurm import Slurm
from fleet.world.world import Worker

# So much is compared in a look, for all namespaces together, each wish of a pod with each machine: half a second
# of it. Who makes thousands of pods, each another one, spends his own namespace's part.
WORK = 2_000_000


@dataclass(frozen=True, slots=True)
class Lender:
    pool: WorkerPool
    names: Mapping[str, str]  # of its pods, with the Node of each
    before: frozenset[str]  # lent already, as Slurm says
    most: int
    wants: Amounts  # what its template asks for; empty: not known


class Table:
    def __init__(
        self,
        lenders: Iterable[Lender],
        workers: Mapping[str, Worker],
        kubernetes: Kubernetes,
        slurm: Slurm,
        now: float,
        policy: Policy,
    ) -> None:
        self.lenders, self.workers = list(lenders), workers
        self.kubernetes, self.slurm, self.now, self.policy = kubernetes, slurm, now, policy
        self.classes = frozenset(policy.lend.classes)
        self.nodes = {name: kubernetes.nodes[node] for one in self.lenders for name, node in one.names.items()}
        self.on: dict[str, list[Guest]] = {}
        for one in kubernetes.guests or ():
            if one.node:
                self.on.setdefault(one.node, []).append(one)
        self.taken: dict[str, list[Guest]] = {}
        # Of these namespaces not all were looked at.
        self.short: set[str] = set()

    def seat(self, *, begin: bool) -> None:
        of: dict[str, Lender] = {}
        held: set[str] = set()
        for one in self.lenders:
            held |= one.before
            may_go = [name for name in one.names if begin and name not in one.before and self._may_go(one, name)]
            of |= dict.fromkeys([*one.before, *may_go], one)
        for name in sorted(held):
            if here := self._stays(of[name], name):
                self.taken[name] = here
        order = [name for name in of if well(self.nodes[name], self.policy, self.now)]
        order.sort(key=lambda name: self._rank(name, name in held))
        self._seat(order, of, held)

    def _seat(self, order: list[str], of: Mapping[str, Lender], held: set[str]) -> None:
        room = {name: self._room(name) for name in order}
        full = Counter(of[name].pool.name for name in self.taken)
        # What is given back in this moment counts, too.
        closed = Counter(of[name].pool.name for name in held | self.taken.keys())
        waiting = self._waiting()
        has = Counter(space for here in self.taken.values() for space in {one.namespace for one in here})
        left = dict.fromkeys(waiting, WORK // max(1, len(waiting)))
        # Room gets less only: who is of the same shape begins where the last one was given something.
        begin: dict[str, int] = {}
        while waiting:
            space = min(waiting, key=lambda name: (has[name], waiting[name][-1].created, name))
            one = waiting[space].pop()
            if not waiting[space]:
                del waiting[space]
            at, seated = begin.get(one.shape, 0), False
            while at < len(order) and left[space] > 0 and not seated:
                left[space] -= one.weight
                name = order[at]
                pool, most = of[name].pool.name, of[name].most
                may = name in self.taken or (full if name in held else closed)[pool] < most
                if may and self._fits(one, name, room[name]):
                    room[name] = less(room[name], one.requests)
                    if name not in self.taken:
                        full[pool] += 1
                        closed[pool] += name not in held
                        has[space] += 1
                    self.taken.setdefault(name, []).append(one)
                    seated = True
                else:
                    at += 1
            begin[one.shape] = at
            if not seated and at < len(order):
                self.short.add(space)
                waiting.pop(space, None)

    def _waiting(self) -> dict[str, list[Guest]]:
        """By namespace, the oldest last."""
        found: dict[str, list[Guest]] = {}
        for one in self.kubernetes.guests or ():
            if one.waits and one.class_ in self.classes:
                found.setdefault(one.namespace, []).append(one)
        for ones in found.values():
            ones.sort(key=attrgetter("created", "name"), reverse=True)
        return found

    def _stays(self, of: Lender, name: str) -> list[Guest]:
        """Who has what was lent. Where our pod has room beside them it comes back, and where one of ours waits for room
        they have it still."""
        worker = self.workers.get(name)
        if worker is not None and worker.pod.node:
            return []
        wants = worker.pod.requests if worker else of.wants
        if wants and holds(self._room(name), wants):
            return []
        return [one for one in self.on.get(self.nodes[name].name, ()) if one.class_ in self.classes]

    def _rank(self, name: str, held: bool) -> tuple[int, bool, str]:
        """What is empty already, then what is idle, also in place of what is held and busy still."""
        worker, node = self.workers.get(name), self.slurm.nodes.get(name)
        busy = node is not None and (node.record.busy or bool(self.slurm.holding(name)))
        return (0 if worker is None else 1 + busy), not held, name

    def _may_go(self, of: Lender, name: str) -> bool:
        """It takes jobs, it is ours, nobody says anything of it, and it is promised to nobody, as far as is known."""
        worker, reserved = self.workers.get(name), self.slurm.reserved
        if reserved is None or name in reserved:
            return False
        if worker is None or worker.slurm is None or worker.pod.owner != of.pool.uid:
            return False
        node, pod = worker.slurm, worker.pod
        usual = pod.ready and not (pod.deleting or pod.ended or node.drained or node.down or LEAVE in pod.annotations)
        return usual and node.record.responds and not held_by_others(node, LEND) and bool(of.pool.most)

    def _room(self, name: str) -> Amounts:
        node = self.nodes[name]
        return less(node.room, *(one.requests for one in self.on.get(node.name, ())))

    def _fits(self, one: Guest, name: str, room: Amounts) -> bool:
        node, worker = self.nodes[name], self.workers.get(name)
        if not holds(room, one.requests):
            return False
        if not one.suits(node.name, node.labels, ((taint.key, taint.value, taint.effect) for taint in node.taints)):
            return False
        # Where it would fit beside our pod, something else keeps it away.
        return worker is None or not holds(less(room, worker.pod.requests), one.requests)
