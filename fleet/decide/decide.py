"""Decide one pass of the fleet: from snapshot, memory, time and policy to changes, notices and the next memory. Pure.

The reconciler calls `decide` for each pass, through `decide_safely`, which survives a bug:

1. Without Kubernetes nothing is decided; without Slurm only fencing and what is shown (`_decide_without_slurm`).
2. `Pass.of` collects the causes of drains of every worker: those of its Node, its pod, its machine and its pool.
3. `Pass.actions` derives all changes that are due from these causes, and notices for operators.
4. `_select_changes` takes what this pass may do: no change in backoff, drains before what only shows or creates
   something, and at most as many as the policy allows. The rest follows in the next passes.
5. `finish` limits how many new texts are reported.
"""

from __future__ import annotations

import traceback
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from fleet.decide import conditions, fencing, remediation, topology
from fleet.decide.actions import (
    LONGEST_RETRY_S,
    RETRY_S,
    Action,
    Adopt,
    CallHook,
    Change,
    ChangeKey,
    CreatePod,
    Evict,
    FleetMemory,
    Free,
    HideOnNode,
    Make,
    NotePool,
    Notice,
    NoticeHistory,
    Place,
    Protect,
    Record,
    RefusedChange,
    ShowOnNode,
    ShowOnPod,
    ShowStates,
    Undrain,
    backoff,
    change_key,
    first_of,
)
from fleet.decide.causes import EVICTING, KINDS, LEAVE, OF_POOL, find_causes, silent_for
from fleet.decide.drain import (
    Budget,
    admit_causes,
    count_budget,
    decide_drain,
    decide_orphan,
    find_awake_orphans,
    find_away,
    find_lost_causes,
    orphan_causes,
    remember_lost_pods,
    restart_slurmd,
    share_places,
)
from fleet.decide.pools import PoolsPlan, plan_pools
from fleet.decide.rollout import report_rollouts
from fleet.policy import Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import Mark, SlurmNode, SlurmView, is_free_comment
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker
from ground.errors import one_line


def protect(worker: Worker, slurm: SlurmView, causes: Mapping[str, str]) -> Free | Protect | None:
    """Label a pod that may be evicted, or remove the label.

    Any client may evict a drained pod that no job holds. Every other pod may get a job at any moment: without
    the label its pool's PodDisruptionBudget allows no eviction. The fleet removes the label before the
    drain; after a person resumes a node, its pod stays evictable until the next pass.
    """
    pod, node = worker.pod, worker.slurm
    if pod.deleting:
        return None
    if node is None and causes.keys() & {"lost", *OF_POOL}:
        return None if pod.free else Free(*pod.identity, None)
    if node is None and pod.lost and worker.name not in slurm.unread:
        return None  # still lost; a restarted fleet counts from zero, and withdraws nothing
    if node is None or not _is_idle(node, causes):
        return Protect(*pod.identity) if pod.free else None
    jobs = slurm.holding(worker.name)
    if pod.free:
        return Protect(*pod.identity) if jobs else None
    return Free(*pod.identity, node.precondition) if jobs == () else None


def _is_idle(node: SlurmNode, causes: Mapping[str, str]) -> bool:
    """Return whether the node is drained and idle by its record, and is not about to be undrained."""
    return node.drained and not node.record.busy and bool(causes or not node.by_fleet)


def leave(worker: Worker, slurm: SlurmView, causes: Mapping[str, str], room: bool) -> Action | None:
    """Evict a pod that should leave, or report what it waits for. `room`: one more pod of its pool may be away."""
    if worker.pod.deleting or not causes.keys() & EVICTING:
        return None
    name, node, pod = worker.name, worker.slurm, worker.pod
    for_pool = bool(causes.keys() & OF_POOL)
    if node is None:
        if "lost" not in causes and not for_pool:
            text = "must leave, but Slurm has no record of it; delete the pod once you know that nothing runs on it"
            return Notice(name, "leave", text)
    elif not node.drained or (not node.by_fleet and not causes.keys() & EVICTING - OF_POOL):
        return None  # not drained yet; a pod that a person drained stays if only its pool requests the departure
    elif not for_pool and (node.by_fleet or LEAVE not in pod.annotations) and pod.created >= node.since:
        # The pod is newer than the drain: do not evict it again without a person's request for this pod.
        return Notice(
            name,
            "leave",
            "came back to the machine that it must leave; to evict it again, annotate it with minivm.io/leave",
        )
    elif hindrance := _explain_wait(node, slurm):
        return Notice(name, "leave", f"must leave, and {hindrance}")
    if not pod.free:
        return None  # not labelled yet
    if not room:
        return Notice(name, "leave", "must leave, and waits until fewer pods of its pool are away")
    reason = pod.annotations.get(LEAVE) or next(
        causes[kind.name] for kind in KINDS if kind.evicts and kind.name in causes
    )
    return Evict(*pod.identity, reason, node.precondition if node else None)


def _explain_wait(node: SlurmNode, slurm: SlurmView) -> str:
    jobs = slurm.holding(node.name)
    if jobs is None:
        return "waits until Slurm tells which jobs run on it"
    if jobs:
        return f"waits for jobs {' '.join(jobs[:8])}"
    return "waits until it is idle" if node.record.busy else ""


# Changes that only show or create objects come last: a refusal must not delay a drain.
LAST = (ShowOnPod, ShowStates, ShowOnNode, HideOnNode, Make, Record, CallHook, Place, CreatePod, Adopt, NotePool)
# Independent changes that end no job: many may run concurrently.
MANY = (Undrain, Protect, ShowOnPod, ShowStates, ShowOnNode, HideOnNode)
PASS_S = 3.0
# The most new texts about one subject in a minute.
MINUTE_S, MOST_NEWS = 60.0, 8


@dataclass(frozen=True, slots=True)
class Decision:
    changes: tuple[Change, ...]
    notices: tuple[Notice, ...]
    news: tuple[Notice, ...]  # the notices that no earlier pass reported
    memory: FleetMemory
    mistake: str = ""  # the traceback of a bug that prevented the decision


def decide(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    kubernetes, slurm = snapshot.kubernetes, snapshot.slurm
    notices: list[Notice] = []
    if snapshot.clocks:
        effect = "until you correct it, the fleet gives up no machine and no deadline ends"
        notices.append(Notice("fleet", "clock", f"{snapshot.clocks}: {effect}"))
        policy = disable_deadlines(policy)
    if isinstance(kubernetes, Unknown) or isinstance(slurm, Unknown):
        sides = (("Kubernetes", kubernetes), ("Slurm", slurm))
        notices += [Notice(name, "unknown", side.why) for name, side in sides if isinstance(side, Unknown)]
        if isinstance(kubernetes, Unknown):
            return finish(memory, notices, (), memory, now)
        return _decide_without_slurm(snapshot, kubernetes, memory, now, policy, notices)
    current = Pass.of(snapshot, kubernetes, slurm, memory, now, policy)
    changes = _sort_out(
        notices,
        current.report_unread(),
        current.actions(),
        current.fencing.actions,
        conditions.show_pages(kubernetes, snapshot.pages),
    )
    selected, refused = _select_changes(changes, memory, now, policy, notices)
    next_memory = FleetMemory(
        absent={node.name: memory.absent.get(node.name, now) for node in find_awake_orphans(snapshot)},
        lost=remember_lost_pods(snapshot, memory.lost, selected, now),
        marks=current.marks(),
        moved=topology.remember_places(current.workers, memory.moved, now) if policy.topology.is_set else {},
        refused=refused,
        idle_nodes_since=current.pools.idle_nodes_since,
        paces={name: pace for name, pace in memory.paces.items() if name in (kubernetes.pools or {})},
    )
    return finish(memory, notices, selected, next_memory, now)


def _decide_without_slurm(
    snapshot: FleetSnapshot,
    kubernetes: KubernetesView,
    memory: FleetMemory,
    now: float,
    policy: Policy,
    notices: list[Notice],
) -> Decision:
    """Decide during an outage of slurmctld: fence its machine if that is dead, and mark shown states as unknown."""
    since = memory.slurm_silent_since or now
    slurm = snapshot.slurm
    changes = _sort_out(
        notices,
        fencing.plan_fencing(kubernetes, slurm, snapshot.proofs, policy, now).actions,
        conditions.show_outage(kubernetes, since, now, policy),
        conditions.show_slinky_busy(kubernetes, policy),
        conditions.show_pages(kubernetes, snapshot.pages),
    )
    changes, refused = _drop_backoff(changes, memory, now)
    changes.sort(key=lambda change: isinstance(change, LAST))
    selected = _within_rate(changes, refused, policy, notices)
    return finish(memory, notices, selected, replace(memory, slurm_silent_since=since), now)


def _sort_out(notices: list[Notice], *actions: Iterable[Action]) -> list[Change]:
    """Add the notices among the actions to `notices`, and return the changes."""
    changes: list[Change] = []
    for source in actions:
        for action in source:
            if isinstance(action, Notice):
                notices.append(action)
            else:
                changes.append(action)
    return changes


def order_pods(changes: Iterable[Change], refused: Container[ChangeKey], paces: Mapping[str, int]) -> list[Change]:
    """Order the creations round-robin over the pools, so that no pool starves another.

    `paces`: the most creations of a pool in one pass.
    """
    rest: list[Change] = []
    by_pool: dict[str, list[CreatePod]] = {}
    for change in changes:
        if isinstance(change, CreatePod):
            by_pool.setdefault(change.pool.name, []).append(change)
        else:
            rest.append(change)
    turns: list[tuple[int, CreatePod]] = []
    for name, creations in by_pool.items():
        # Refused pods come last: the reason may concern that pod only.
        creations.sort(key=lambda creation: change_key(creation) in refused)
        turns += enumerate(creations[: paces.get(name, len(creations))])
    turns.sort(key=lambda turn: turn[0])
    return [*rest, *(creation for _, creation in turns)]


def _select_changes(
    changes: list[Change], memory: FleetMemory, now: float, policy: Policy, notices: list[Notice]
) -> tuple[tuple[Change, ...], dict[ChangeKey, RefusedChange]]:
    """Return the changes of this pass in their order, and the refusals of changes that are still due."""
    changes, refused = _drop_backoff(changes, memory, now)
    changes = order_pods(changes, refused, memory.paces)

    def order(change: Change) -> tuple[bool, ...]:
        """Sort changes that only show or create to the end, and those behind others that were refused before."""
        is_urgent = isinstance(change, ShowStates) and change.urgent
        return isinstance(change, LAST), not is_urgent, change_key(change) in refused, isinstance(change, CreatePod)

    changes.sort(key=order)
    return _within_rate(changes, refused, policy, notices), refused


def _drop_backoff(
    changes: list[Change], memory: FleetMemory, now: float
) -> tuple[list[Change], dict[ChangeKey, RefusedChange]]:
    """Drop changes in backoff; also return the refusals of changes that are still due."""
    due = {change_key(change) for change in changes}
    refused = {key: refusal for key, refusal in memory.refused.items() if key in due}
    waiting = {key for key, refusal in refused.items() if now < refusal.until}
    return [change for change in changes if change_key(change) not in waiting], refused


def _within_rate(
    changes: list[Change], refused: Mapping[ChangeKey, RefusedChange], policy: Policy, notices: list[Notice]
) -> tuple[Change, ...]:
    """Take as many changes as the policy allows in one pass, and report if more are due."""
    most_careful, most_light = policy.changes, int(policy.rate * PASS_S)
    careful = [change for change in changes if not isinstance(change, MANY)]
    light = [change for change in changes if isinstance(change, MANY)]
    if len(careful) > most_careful or len(light) > most_light:
        limit = most_careful if len(careful) > most_careful else most_light
        notices.append(
            Notice("fleet", "rate", f"more than {limit} changes are due; the rest follow in the next passes")
        )
    return (*share_places(careful, refused, most_careful), *share_places(light, refused, most_light))


def disable_deadlines(policy: Policy) -> Policy:
    """Disable all deadlines; existing drains for a deadline stay."""
    never = float("inf")
    within = policy.leave_within_s and never
    lend = replace(policy.lend, notice_s=never)
    return replace(policy, dead_s=never, not_ready_s=never, leave_within_s=within, lend=lend)


def _disable_pool_deadlines(kubernetes: KubernetesView) -> KubernetesView:
    """Disable the pools' deadlines; a deadline of 0 depends on no clock and stays."""
    if kubernetes.pools is None:
        return kubernetes
    never = float("inf")
    timeless = {name: replace(pool, deadline_s=pool.deadline_s and never) for name, pool in kubernetes.pools.items()}
    return replace(kubernetes, pools=timeless)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass in which both sides are known: its input, and the plans from which its actions follow."""

    snapshot: FleetSnapshot
    kubernetes: KubernetesView
    slurm: SlurmView
    memory: FleetMemory
    now: float
    policy: Policy
    goals: remediation.Goals | None
    pools: PoolsPlan
    fencing: fencing.FencingPlan
    workers: tuple[Worker, ...]
    # The causes of each worker whose Node is known: while a Node is unknown, so is the end of a cause.
    causes: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(
        cls,
        snapshot: FleetSnapshot,
        kubernetes: KubernetesView,
        slurm: SlurmView,
        memory: FleetMemory,
        now: float,
        policy: Policy,
    ) -> Pass:
        goals, workers = remediation.derive_goals(snapshot, now, policy), tuple(snapshot.workers())
        # With a wrong clock, waiting and idle times are unknown.
        dated = (
            (_disable_pool_deadlines(kubernetes), replace(slurm, pending=None))
            if snapshot.clocks
            else (kubernetes, slurm)
        )
        pools = plan_pools(workers, *dated, now, policy, memory.idle_nodes_since, memory.refused)
        fences = fencing.plan_fencing(kubernetes, slurm, snapshot.proofs, policy, now)
        causes = {
            worker.name: {
                **find_causes(worker, policy, now),
                **fences.causes.get(worker.pod.node, {}),
                **find_lost_causes(worker, slurm, memory.lost.get(worker.name), now, policy),
                **remediation.goal_causes(worker, goals, kubernetes),
                **pools.causes.get(worker.name, {}),
            }
            for worker in workers
            if worker.node is not None
        }
        return cls(snapshot, kubernetes, slurm, memory, now, policy, goals, pools, fences, workers, causes)

    def actions(self) -> Iterator[Action]:
        placed = [worker for worker in self.workers if worker.node is not None]
        orphans = {
            node.name: (node, orphan_causes(self.now - self.memory.absent.get(node.name, self.now), self.policy))
            for node in find_awake_orphans(self.snapshot)
        }
        silent = [worker.name for worker in placed if worker.node and silent_for(worker.node, self.now) >= 0]
        drainable = {worker.name: (worker.slurm, self.causes[worker.name]) for worker in placed} | orphans
        limits = count_budget(drainable, self.policy, [*silent, *orphans])
        if limits.paused:
            yield _pause(limits, len(drainable))
        yield from self._of_workers(placed, limits)
        for name, (node, causes) in orphans.items():
            counted = admit_causes(node, causes, limits)
            will_exist = self.kubernetes.will_exist(name)
            yield from filter(None, [decide_orphan(node, self.slurm, counted, will_exist=will_exist)])
        yield from self._of_nodes(placed, limits)
        yield from self.pools.actions
        yield from report_rollouts(self.workers, self.kubernetes)
        if self.goals is not None:
            yield from remediation.cordon_without_worker(self.goals)
            # Deadlines of remedies and times in the history wait for a trusted clock.
            if not self.snapshot.clocks:
                yield from remediation.record_machines(
                    self.goals, self.kubernetes, self.slurm, self.now, self.policy, self.memory.refused
                )
        yield from self._places()

    def _of_workers(self, workers: Iterable[Worker], limits: Budget) -> Iterator[Action]:
        """Drain, label and evict workers, and show their state."""
        missing = {pool: names - self.pools.spare for pool, names in find_away(self.workers).items()}
        for worker in workers:
            name, node = worker.name, worker.slurm
            causes = admit_causes(node, self.causes[name], limits)
            guard = protect(worker, self.slurm, causes)
            if name in self.pools.maybe_claimed and isinstance(guard, Free):
                guard = None  # the next pass may withdraw the label: freeing it in each pass would never end
            drain_action = decide_drain(worker, causes, self._mark(worker))
            if isinstance(drain_action, Undrain) and conditions.shows_slinky_drain(worker.pod):
                drain_action = None  # programs that delete drained pods must see the end of the drain first
            ends = node is not None and node.by_fleet and not causes
            slinky = conditions.show_slinky_states(worker, self.slurm, self.policy, ends=ends)
            yield from filter(None, [drain_action, guard, conditions.show_on_pod(worker), slinky])
            yield from restart_slurmd(worker, self.slurm, self.memory.lost.get(name), self.now, self.policy)
            if self.pools.pools_unknown or name in self.pools.maybe_claimed:
                continue
            pods_away = missing.setdefault(worker.pod.pool, set())
            room = self.pools.has_room(worker, len(pods_away) - (name in pods_away), self.policy)
            if (departure := leave(worker, self.slurm, causes, room)) is not None:
                yield departure
                if isinstance(departure, Evict):
                    pods_away.add(name)

    def _of_nodes(self, workers: Iterable[Worker], limits: Budget) -> Iterator[Action]:
        """Set cordons and conditions of Nodes with workers, and remove conditions from Nodes without workers."""
        kubernetes, policy = self.kubernetes, self.policy
        workers_on: dict[str, list[Worker]] = {}
        for worker in workers:
            workers_on.setdefault(worker.pod.node, []).append(worker)
        for name, workers_there in workers_on.items():
            node, goal = kubernetes.nodes[name], self.goals.of_node(name) if self.goals else remediation.UP
            # An unknown goal, or one that a pause suspends, lifts no cordon.
            if not kubernetes.machines_unknown and (goal.up or goal.person or not limits.paused):
                yield from filter(None, [conditions.follow_cordon(node, workers_there, policy, goal.text)])
            yield from filter(None, [conditions.show_on_node(node, workers_there, policy, kubernetes.fleet_mark)])
        occupied = {pod.node for pod in kubernetes.pods.values()}
        for node in kubernetes.nodes.values():
            hide = None if node.name in occupied else conditions.hide_on_node(node, policy, kubernetes.fleet_mark)
            if hide is not None and kubernetes.can_read_pods_on(node.name):
                yield hide

    def _places(self) -> Iterator[Action]:
        wanted = self.policy.topology
        if wanted.is_set and any(worker.slurm and worker.slurm.topology is None for worker in self.workers):
            yield Notice("fleet", "topology", "Slurm before 25.05 takes no places; see `fleet topology` for a file")
        elif domains := topology.find_unlisted_domains(self.workers, wanted):
            text = "workers are in no block; add their domains to topology.blocks.domains"
            yield Notice("fleet", "topology", f"{text}: {first_of(domains, 3, ', ')}")
        for worker in self.workers:
            if (change := topology.find_due_place(worker, wanted)) is None:
                continue
            if topology.is_restless(self.memory.moved.get(worker.name), self.now):
                text = "changed its place too often; the fleet sets it again after an hour without changes"
                yield Notice(worker.name, "topology", text)
            else:
                yield change

    def report_unread(self) -> Iterator[Notice]:
        """Report the objects that cannot be read."""
        for name, problem in self.kubernetes.unread.items():
            yield Notice(name, "unread", problem)
        for name, problem in self.slurm.unread.items():
            yield Notice(f"Slurm/{name}", "unread", problem)
        for name, problem in self.slurm.doubts.items():
            effect = "the fleet evicts, removes, lends and shrinks nothing that depends on it"
            yield Notice("fleet", "unread", f"Slurm's {name} cannot be read, so {effect}: {problem}")

    def _mark(self, worker: Worker) -> Mark | None:
        node = worker.slurm
        if node is None:
            return None
        return node.mark or (None if is_free_comment(node.comment) else self.memory.marks.get(worker.name))

    def marks(self) -> Mapping[str, Mark]:
        """Remember marks that a person's comment displaces in Slurm, as long as their causes last."""
        marks = {}
        for worker in self.workers:
            if worker.slurm is None or is_free_comment(worker.slurm.comment):
                continue
            mark = worker.slurm.mark if worker.slurm.by_fleet else self.memory.marks.get(worker.name)
            if mark is not None and (worker.node is None or self.causes[worker.name]):
                marks[worker.name] = mark
        return marks


def _pause(limits: Budget, total: int) -> Notice:
    # Without the present number: a new text would be reported in each pass.
    unwell = f"more than {limits.most} of {total} workers have unwell machines, probably for a common cause"
    return Notice("fleet", "pause", f"{unwell}: the fleet drains no other worker for that until fewer are unwell")


def finish(
    memory: FleetMemory,
    notices: Iterable[Notice],
    changes: tuple[Change, ...],
    next_memory: FleetMemory,
    now: float,
    mistake: str = "",
) -> Decision:
    """Build the decision, and limit how many new texts per minute and subject are reported.

    Users write parts of the texts, such as the message of a condition, and must not be able to fill the log.
    """
    notices = tuple(notices)
    by_key: dict[tuple[str, str], list[Notice]] = {}
    for notice in notices:
        by_key.setdefault((notice.about, notice.kind), []).append(notice)
    # Remember ended notices for the rest of their minute, since they may recur.
    histories = {
        key: replace(history, texts=frozenset())
        for key, history in memory.reported.items()
        if key not in by_key and now - history.since < MINUTE_S
    }
    news: list[Notice] = []
    for key, current in by_key.items():
        history = memory.reported.get(key, NoticeHistory(since=now))
        new = [notice for notice in current if notice.text not in history.texts]
        if new and now - history.since >= MINUTE_S:
            history = replace(history, since=now, times=0)
        if new and history.times >= MOST_NEWS:
            histories[key] = history  # reported in a later minute, if it still holds
            continue
        news += new
        texts = frozenset(notice.text for notice in current)
        histories[key] = NoticeHistory(texts, history.since, history.times + bool(new))
    return Decision(changes, notices, tuple(news), replace(next_memory, reported=histories), mistake)


MISTAKE = "mistake"
FRAMES, MOST_ERROR = 8, 512


def decide_safely(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    """Decide; after a bug return a decision that holds only a notice, and in `mistake` the traceback for the log.

    Otherwise the fleet would crash on the same snapshot after each restart and report nothing. Drop the memory except
    for reported notices: it may trigger the bug, and losing it is always safe.
    """
    try:
        return decide(snapshot, memory, now, policy)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__, -FRAMES)
        error_text = one_line(f"{type(error).__name__}: {error}")[:MOST_ERROR]
        last = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
        text = f"nothing is decided: {error_text} ({last}): a bug of the fleet; report the traceback in its log"
        trace = "".join(traceback.format_list(frames)) + error_text
        return finish(memory, [Notice("fleet", MISTAKE, text)], (), FleetMemory(), now, mistake=trace)


def read_mistake(decision: Decision) -> str:
    """Return the text of the bug's notice; empty: no bug."""
    return next((notice.text for notice in decision.notices if notice.kind == MISTAKE), "") if decision.mistake else ""


@dataclass(slots=True)
class Backoff:
    """The pause after a bug, longer each time: the next snapshot may not trigger it."""

    times: int = 0
    until: float = 0.0
    mistake: str = ""

    def update(self, decision: Decision, now: float) -> None:
        self.mistake = read_mistake(decision)
        if not self.mistake:
            self.times, self.until = 0, 0.0
            return
        self.until = now + backoff(RETRY_S, self.times, LONGEST_RETRY_S)
        self.times += 1

    def waits(self, now: float) -> bool:
        return now < self.until
