"""Lending: machines of pools for guest pods that find no room; idle machines first, busy ones with notice.

Slurm records each loan: the fleet's drain for it stays on the node while the node has no pod. The fleet remembers
nothing else, so a machine whose drain a person lifts belongs to its pool again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from fleet import FleetError
from fleet.decide.actions import Notice, first_of
from fleet.decide.causes import LEAVE, cause, is_past_deadline, takes_new_pods
from fleet.decide.drain import is_lent
from fleet.decide.rollout import is_held_by_others
from fleet.policy import Policy
from fleet.world.fields import Fields
from fleet.world.guests import Amounts, Guest, covers, requests, subtract
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import rfc3339
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import WorkerPool

# The comparisons in one pass, for all namespaces together: about half a second. A user with thousands of different
# pods spends only the share of the user's own namespace.
WORK = 2_000_000
UNNAMED = "an unknown requester"


@dataclass(frozen=True, slots=True)
class Lender:
    pool: WorkerPool
    names: Mapping[str, str]  # pod name -> Node
    lent: frozenset[str]  # lent already, according to Slurm
    most_lent: int
    requests: Amounts  # what its template requests; empty: not known


class Allocation:
    """Guests assigned to machines in one pass; the namespace with the fewest machines is served next."""

    def __init__(
        self,
        lenders: Iterable[Lender],
        workers: Mapping[str, Worker],
        kubernetes: KubernetesView,
        slurm: SlurmView,
        now: float,
        policy: Policy,
    ) -> None:
        self.lenders, self.workers = list(lenders), workers
        self.kubernetes, self.slurm, self.now, self.policy = kubernetes, slurm, now, policy
        self.classes = frozenset(policy.lend.classes)
        nodes = kubernetes.nodes
        self.nodes = {name: nodes[node] for lender in self.lenders for name, node in lender.names.items()}
        self.guests_on: dict[str, list[Guest]] = {}
        for guest in kubernetes.guests or ():
            if guest.node:
                self.guests_on.setdefault(guest.node, []).append(guest)
        self.assigned: dict[str, list[Guest]] = {}
        # Namespaces of which not all guests were compared.
        self.unfinished: set[str] = set()

    def assign(self, *, begin: bool) -> None:
        """Assign machines; `begin`: whether new loans may begin."""
        lender_of: dict[str, Lender] = {}
        lent_names: set[str] = set()
        for lender in self.lenders:
            lent_names |= lender.lent
            more = [name for name in lender.names if begin and name not in lender.lent and self._may_go(lender, name)]
            lender_of |= dict.fromkeys([*lender.lent, *more], lender)
        for name in sorted(lent_names):
            if guests := self._list_staying_guests(lender_of[name], name):
                self.assigned[name] = guests
        order = [name for name in lender_of if takes_new_pods(self.nodes[name], self.policy, self.now)]
        order.sort(key=lambda name: self._rank(name, name in lent_names))
        self._assign_waiting(order, lender_of, lent_names)

    def _assign_waiting(self, order: list[str], lender_of: Mapping[str, Lender], lent_names: set[str]) -> None:
        room = {name: self._room(name) for name in order}
        taken_in = Counter(lender_of[name].pool.name for name in self.assigned)
        # Machines that are given back in this pass still count.
        occupied_in = Counter(lender_of[name].pool.name for name in lent_names | self.assigned.keys())
        waiting = self._list_waiting()
        machines_of = Counter(
            space for guests in self.assigned.values() for space in {guest.namespace for guest in guests}
        )
        work_left = dict.fromkeys(waiting, WORK // max(1, len(waiting)))
        # Room only shrinks, so a guest of the same shape continues where the last one found a machine.
        start: dict[str, int] = {}
        while waiting:
            space = min(waiting, key=lambda name: (machines_of[name], waiting[name][-1].created, name))
            guest = waiting[space].pop()
            if not waiting[space]:
                del waiting[space]
            position, placed = start.get(guest.shape, 0), False
            while position < len(order) and work_left[space] > 0 and not placed:
                work_left[space] -= guest.weight
                name = order[position]
                pool, most = lender_of[name].pool.name, lender_of[name].most_lent
                has_room = name in self.assigned or (taken_in if name in lent_names else occupied_in)[pool] < most
                if has_room and self._fits(guest, name, room[name]):
                    room[name] = subtract(room[name], guest.requests)
                    if name not in self.assigned:
                        taken_in[pool] += 1
                        occupied_in[pool] += name not in lent_names
                        machines_of[space] += 1
                    self.assigned.setdefault(name, []).append(guest)
                    placed = True
                else:
                    position += 1
            start[guest.shape] = position
            if not placed and position < len(order):
                self.unfinished.add(space)
                waiting.pop(space, None)

    def _list_waiting(self) -> dict[str, list[Guest]]:
        """Return the waiting guests by namespace, the oldest last."""
        guests_of: dict[str, list[Guest]] = {}
        for guest in self.kubernetes.guests or ():
            if guest.waits and guest.class_ in self.classes:
                guests_of.setdefault(guest.namespace, []).append(guest)
        for guests in guests_of.values():
            guests.sort(key=attrgetter("created", "name"), reverse=True)
        return guests_of

    def _list_staying_guests(self, lender: Lender, name: str) -> list[Guest]:
        """Return the guests on a lent machine; none if the pool's pod is back, or fits there together with them."""
        worker = self.workers.get(name)
        if worker is not None and worker.pod.node:
            return []
        wants = worker.pod.requests if worker else lender.requests
        if wants and covers(self._room(name), wants):
            return []
        return [guest for guest in self.guests_on.get(self.nodes[name].name, ()) if guest.class_ in self.classes]

    def _rank(self, name: str, is_lent_already: bool) -> tuple[int, bool, str]:
        """Order the machines: empty ones, then idle ones, then busy ones; each with lent machines first."""
        worker, node = self.workers.get(name), self.slurm.nodes.get(name)
        busy = node is not None and (node.record.busy or bool(self.slurm.holding(name)))
        return (0 if worker is None else 1 + busy), not is_lent_already, name

    def _may_go(self, lender: Lender, name: str) -> bool:
        """Return whether the pool may lend this worker: its own, healthy, and not held, requested or reserved."""
        worker, reserved = self.workers.get(name), self.slurm.reserved
        if reserved is None or name in reserved:
            return False
        if worker is None or worker.slurm is None or worker.pod.owner != lender.pool.uid:
            return False
        node, pod = worker.slurm, worker.pod
        usual = pod.ready and not (pod.deleting or pod.ended or node.drained or node.down or LEAVE in pod.annotations)
        return (
            usual and node.record.responds and not is_held_by_others(node, "lend") and bool(lender.pool.max_unavailable)
        )

    def _room(self, name: str) -> Amounts:
        node = self.nodes[name]
        return subtract(node.room, *(guest.requests for guest in self.guests_on.get(node.name, ())))

    def _fits(self, guest: Guest, name: str, room: Amounts) -> bool:
        node, worker = self.nodes[name], self.workers.get(name)
        if not covers(room, guest.requests):
            return False
        if not guest.suits(node.name, node.labels, ((taint.key, taint.value, taint.effect) for taint in node.taints)):
            return False
        # If the guest fits together with the pool's pod, its waiting has another cause.
        return worker is None or not covers(subtract(room, worker.pod.requests), guest.requests)


@dataclass(frozen=True, slots=True)
class Loans:
    """The pods of one pool that go, or do not come, and for which guests; by name."""

    guests_of: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    lends: bool = False  # whether the pool lends at all

    @property
    def text(self) -> str:
        return first_of([f"{name} to {self.guests_of[name]}" for name in sorted(self.guests_of)], separator="; ")


NONE = Loans()


def plan_loans(
    pools: Iterable[WorkerPool],
    workers: Iterable[Worker],
    kubernetes: KubernetesView,
    slurm: SlurmView,
    now: float,
    policy: Policy,
) -> Mapping[str, Loans]:
    """Plan the loans of all pools together, so that a guest gets one machine only."""
    loans, lenders = _sort_lenders(pools, kubernetes, slurm, policy)
    if not lenders:
        return loans
    by_name = {worker.name: worker for worker in workers}
    allocation = Allocation(lenders, by_name, kubernetes, slurm, now, policy)
    allocation.assign(begin=policy.lend.notice_s < inf)
    for lender in lenders:
        guests_unknown = bool(kubernetes.unknown_namespaces)
        loan = _plan_loans_of(lender, allocation.assigned, by_name, now, policy, guests_unknown=guests_unknown)
        loans[lender.pool.name] = loan
    if allocation.unfinished:
        # Reported once, with the first pool.
        first = lenders[0].pool.name
        notices = [
            Notice("fleet", "lend", _explain_unfinished(namespace)) for namespace in sorted(allocation.unfinished)
        ]
        loans[first] = replace(loans[first], notices=(*loans[first].notices, *notices))
    return loans


def _sort_lenders(
    pools: Iterable[WorkerPool], kubernetes: KubernetesView, slurm: SlurmView, policy: Policy
) -> tuple[dict[str, Loans], list[Lender]]:
    """Return the loans of pools that cannot lend now, by the pool's name, and the pools that may lend."""
    loans: dict[str, Loans] = {}
    lenders: list[Lender] = []
    for pool in pools:
        if (share := policy.lend.pools.get(pool.label)) is None:
            continue
        names = kubernetes.desired_pods.get(pool.name, {})
        before = frozenset(name for name in names if (node := slurm.nodes.get(name)) and is_lent(node))
        if pool.selector is None:
            notice = Notice(
                pool.name,
                "lend",
                "lends no machine, because only pools of mode perNode do; remove it from the policy's lend.pools",
            )
            loans[pool.name] = Loans(notices=(notice,))
        elif kubernetes.guests is None:
            # The demand is not known: lend nothing more, and take nothing back.
            lent_names = dict.fromkeys(before, UNNAMED)
            loans[pool.name] = Loans(lent_names, {name: cause("lend", UNNAMED) for name in lent_names}, lends=True)
        else:
            # The small addend makes 0.29 of 100 the wanted 29.
            lenders.append(Lender(pool, names, before, int(share * len(names) + 1e-9), _read_requests(pool)))
    return loans, lenders


def report_unknown_lenders(labels: Container[str], policy: Policy) -> Iterator[Notice]:
    """Report pools that the policy names and that do not exist, such as misspelled ones."""
    for name in sorted(policy.lend.pools):
        if name not in labels:
            text = f"the policy's lend.pools names {name}, but no WorkerPool has that label; correct the name"
            yield Notice("fleet", "lend", text)


def _read_requests(pool: WorkerPool) -> Amounts:
    try:
        return requests(Fields(pool.template, "spec.template").sub("spec"))
    except FleetError:
        return {}


def _plan_loans_of(
    lender: Lender,
    taken: Mapping[str, list[Guest]],
    workers: Mapping[str, Worker],
    now: float,
    policy: Policy,
    *,
    guests_unknown: bool,
) -> Loans:
    guests_at = {name: _name_guests(taken[name]) for name in lender.names if name in taken}
    causes = {name: _find_causes(workers[name], guests_at[name], now, policy) for name in guests_at if name in workers}
    # While a namespace is unknown, its guests may have the machine: it is not taken back, and ends no job.
    lent_names = sorted(lender.lent - guests_at.keys()) if guests_unknown else []
    guests_at |= dict.fromkeys(lent_names, UNNAMED)
    causes |= {name: cause("lend", UNNAMED) for name in lent_names if name in workers}
    notices = [
        Notice(name, "lend", causes[name]["lend"])
        if name in causes
        else Notice(lender.names[name], "lend", f"is lent to {guests}")
        for name, guests in sorted(guests_at.items())
    ]
    return Loans(guests_at, causes, tuple(notices), lends=True)


def _find_causes(worker: Worker, to: str, now: float, policy: Policy) -> Mapping[str, str]:
    node, notice = worker.slurm, policy.lend.notice_s
    if node is not None and node.runs and is_past_deadline(worker.pod, node, {"lend"}, notice, now):
        return cause("lend", to) | cause("deadline", notice)
    if node is None or notice == inf or "deadline" in node.kinds:
        return cause("lend", to)
    return cause("lend", f"{to} at {rfc3339(int((node.since if is_lent(node) else now) + notice))}")


def _explain_unfinished(namespace: str) -> str:
    return f"so many different pods wait in namespace {namespace} that the fleet looks at the oldest only"


def _name_guests(guests: list[Guest]) -> str:
    more = f" and {len(guests) - 1} more" if len(guests) > 1 else ""
    return f"{guests[0].name} of class {guests[0].class_}{more}"
