"""Machines that pools give to pods of others that find no room, by policy: idle ones first, busy ones with notice.

What is lent stands in Slurm: its node is drained by us for that, also while it has no pod. So nothing is remembered,
and a machine whose drain somebody lifts is the pool's again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from fleet import reasons
from fleet.decide.actions import Notice
from fleet.decide.causes import LEAVE, LEND, late, well
from fleet.decide.orphans import lent as is_lent
from fleet.decide.pools.rollout import held_by_others
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world import fields
from fleet.world.guests import Amounts, Guest, holds, less, requests
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import stamp
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import WorkerPool

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


class Allocation:
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


NAMED = 5
WANTED = "whoever wanted it"


@dataclass(frozen=True, slots=True)
class Loans:
    """The pods of one pool that go, or do not come, and for whom; by name."""

    to: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tells: tuple[Notice, ...] = ()
    may: bool = False  # whether it lends at all

    @property
    def words(self) -> str:
        more = f" and {len(self.to) - NAMED} more" if len(self.to) > NAMED else ""
        return "; ".join(f"{name} to {self.to[name]}" for name in sorted(self.to)[:NAMED]) + more


NONE = Loans()


def lent(
    pools: Iterable[WorkerPool],
    everyone: Iterable[Worker],
    kubernetes: Kubernetes,
    slurm: Slurm,
    now: float,
    policy: Policy,
) -> Mapping[str, Loans]:
    """By pool. All at once: who is given a machine of one pool asks no other one."""
    found: dict[str, Loans] = {}
    lenders: list[Lender] = []
    for pool in pools:
        if (share := policy.lend.pools.get(pool.label)) is None:
            continue
        names = kubernetes.wanted.get(pool.name, {})
        before = frozenset(name for name in names if (node := slurm.nodes.get(name)) and is_lent(node))
        if pool.selector is None:
            found[pool.name] = Loans(
                tells=(Notice(pool.name, LEND, "lends no machine: only a pool of mode perNode does"),)
            )
        elif kubernetes.guests is None:
            # What they ask for is not known: nothing is begun, and nothing given back.
            kept = dict.fromkeys(before, WANTED)
            found[pool.name] = Loans(kept, {name: {LEND: f"wanted by {WANTED}"} for name in kept}, may=True)
        else:
            # A share of 0.29 is 29 of 100.
            lenders.append(Lender(pool, names, before, int(share * len(names) + 1e-9), _wants(pool)))
    if not lenders:
        return found
    workers = {one.name: one for one in everyone}
    table = Allocation(lenders, workers, kubernetes, slurm, now, policy)
    table.seat(begin=policy.lend.notice_s < inf)
    for one in lenders:
        found[one.pool.name] = _lent(one, table.taken, workers, now, policy, unsure=bool(kubernetes.silent))
    if table.short:
        # Once, whichever pool it is told with.
        first = lenders[0].pool.name
        tells = [Notice("fleet", LEND, _short(namespace)) for namespace in sorted(table.short)]
        found[first] = replace(found[first], tells=(*found[first].tells, *tells))
    return found


def unknown(labels: Container[str], policy: Policy) -> Iterator[Notice]:
    """A name that is written wrong lends nothing, and is to be told from one that has nothing to lend."""
    for name in sorted(policy.lend.pools):
        if name not in labels:
            yield Notice(
                "fleet", LEND, f"the policy lends machines of pool {name}, and there is no WorkerPool of that label"
            )


def _wants(pool: WorkerPool) -> Amounts:
    try:
        return requests(fields.mapping(pool.template.get("spec"), "spec.template.spec"))
    except FleetError:
        return {}


def _lent(
    of: Lender,
    taken: Mapping[str, list[Guest]],
    workers: Mapping[str, Worker],
    now: float,
    policy: Policy,
    *,
    unsure: bool,
) -> Loans:
    to = {name: _few(taken[name]) for name in of.names if name in taken}
    causes = {name: _causes(workers[name], to[name], now, policy) for name in to if name in workers}
    # Whoever has it may be of a namespace of which nothing is known just now: it is not given back, and ends no job.
    kept = sorted(of.before - to.keys()) if unsure else []
    to |= dict.fromkeys(kept, WANTED)
    causes |= {name: {LEND: f"wanted by {WANTED}"} for name in kept if name in workers}
    tells = [
        Notice(name, LEND, causes[name][LEND]) if name in causes else Notice(of.names[name], LEND, f"is lent to {who}")
        for name, who in sorted(to.items())
    ]
    return Loans(to, causes, tuple(tells), may=True)


def _causes(worker: Worker, to: str, now: float, policy: Policy) -> Mapping[str, str]:
    node, notice = worker.slurm, policy.lend.notice_s
    if node is not None and node.runs and late(worker.pod, node, {LEND}, notice, now):
        return {LEND: f"wanted by {to}", "deadline": f"its jobs had {notice:g} s"}
    if node is None or notice == inf or "deadline" in reasons.kinds(node.reason):
        return {LEND: f"wanted by {to}"}
    return {LEND: f"wanted by {to} at {stamp(int((node.since if is_lent(node) else now) + notice))}"}


def _short(namespace: str) -> str:
    return f"of namespace {namespace} so many different pods wait that not all are looked at: the oldest are"


def _few(guests: list[Guest]) -> str:
    more = f" and {len(guests) - 1} more" if len(guests) > 1 else ""
    return f"{guests[0].name} of class {guests[0].class_}{more}"
