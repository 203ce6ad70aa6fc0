"""Machines that pools give to pods of others that find no room, by policy: idle ones first, busy ones with notice.

What is lent stands in Slurm: its node is drained by us for that, also while it has no pod. So nothing is remembered,
and a machine whose drain somebody lifts is the pool's again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from fleet import words
from fleet.decide.actions import Tell
from fleet.decide.causes import LEND, late
from fleet.decide.gone import lent as is_lent
from fleet.decide.pools.seats import Lender, Table
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world import reading
from fleet.world.guests import Amounts, Guest, requests
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import stamp
from fleet.world.pool import WorkerPool
from fleet.world.slurm import Slurm
from fleet.world.world import Worker

NAMED = 5
WANTED = "whoever wanted it"


@dataclass(frozen=True, slots=True)
class Lent:
    """The pods of one pool that go, or do not come, and for whom; by name."""

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
    pools: Iterable[WorkerPool],
    everyone: Iterable[Worker],
    kubernetes: Kubernetes,
    slurm: Slurm,
    now: float,
    policy: Policy,
) -> Mapping[str, Lent]:
    """By pool. All at once: who is given a machine of one pool asks no other one."""
    found: dict[str, Lent] = {}
    lenders: list[Lender] = []
    for pool in pools:
        if (share := policy.lend.pools.get(pool.label)) is None:
            continue
        names = kubernetes.wanted.get(pool.name, {})
        before = frozenset(name for name in names if (node := slurm.nodes.get(name)) and is_lent(node))
        if pool.selector is None:
            found[pool.name] = Lent(
                tells=(Tell(pool.name, LEND, "lends no machine: only a pool of mode perNode does"),)
            )
        elif kubernetes.guests is None:
            # What they ask for is not known: nothing is begun, and nothing given back.
            kept = dict.fromkeys(before, WANTED)
            found[pool.name] = Lent(kept, {name: {LEND: f"wanted by {WANTED}"} for name in kept}, may=True)
        else:
            # A share of 0.29 is 29 of 100.
            lenders.append(Lender(pool, names, before, int(share * len(names) + 1e-9), _wants(pool)))
    if not lenders:
        return found
    workers = {one.name: one for one in everyone}
    table = Table(lenders, workers, kubernetes, slurm, now, policy)
    table.seat(begin=policy.lend.notice_s < inf)
    for one in lenders:
        found[one.pool.name] = _lent(one, table.taken, workers, now, policy, unsure=bool(kubernetes.silent))
    if table.short:
        # Once, whichever pool it is told with.
        first = lenders[0].pool.name
        tells = [Tell("fleet", LEND, _short(namespace)) for namespace in sorted(table.short)]
        found[first] = replace(found[first], tells=(*found[first].tells, *tells))
    return found


def unknown(labels: Container[str], policy: Policy) -> Iterator[Tell]:
    """A name that is written wrong lends nothing, and is to be told from one that has nothing to lend."""
    for name in sorted(policy.lend.pools):
        if name not in labels:
            yield Tell(
                "fleet", LEND, f"the policy lends machines of pool {name}, and there is no WorkerPool of that label"
            )


def _wants(pool: WorkerPool) -> Amounts:
    try:
        return requests(reading.mapping(pool.template.get("spec"), "spec.template.spec"))
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
) -> Lent:
    to = {name: _few(taken[name]) for name in of.names if name in taken}
    causes = {name: _causes(workers[name], to[name], now, policy) for name in to if name in workers}
    # Whoever has it may be of a namespace of which nothing is known just now: it is not given back, and ends no job.
    kept = sorted(of.before - to.keys()) if unsure else []
    to |= dict.fromkeys(kept, WANTED)
    causes |= {name: {LEND: f"wanted by {WANTED}"} for name in kept if name in workers}
    tells = [
        Tell(name, LEND, causes[name][LEND]) if name in causes else Tell(of.names[name], LEND, f"is lent to {who}")
        for name, who in sorted(to.items())
    ]
    return Lent(to, causes, tuple(tells), may=True)


def _causes(worker: Worker, to: str, now: float, policy: Policy) -> Mapping[str, str]:
    node, notice = worker.slurm, policy.lend.notice_s
    if node is not None and node.runs and late(worker.pod, node, {LEND}, notice, now):
        return {LEND: f"wanted by {to}", "deadline": f"its jobs had {notice:g} s"}
    if node is None or notice == inf or "deadline" in words.kinds(node.reason):
        return {LEND: f"wanted by {to}"}
    return {LEND: f"wanted by {to} at {stamp(int((node.since if is_lent(node) else now) + notice))}"}


def _short(namespace: str) -> str:
    return f"of namespace {namespace} so many different pods wait that not all are looked at: the oldest are"


def _few(guests: list[Guest]) -> str:
    more = f" and {len(guests) - 1} more" if len(guests) > 1 else ""
    return f"{guests[0].name} of class {guests[0].class_}{more}"
