"""Decide one pass: derive changes, notices and the next memory from snapshot, memory, time and policy."""

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
    CreatePod,
    Evict,
    FleetMemory,
    Free,
    HideOnNode,
    Key,
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
    action_key,
    backoff,
    first_of,
)
from fleet.decide.causes import EVICTING, KINDS, LEAVE, OF_POOL, find_causes, silent_for
from fleet.decide.drain import (
    Budget,
    admit_causes,
    awake_orphans,
    count_budget,
    decide_drain,
    decide_orphan,
    find_away,
    lost_causes,
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
    elif hindrance := _hindrance(node, slurm):
        return Notice(name, "leave", f"must leave, and {hindrance}")
    if not pod.free:
        return None  # not labelled yet
    if not room:
        return Notice(name, "leave", "must leave, and waits until fewer pods of its pool are away")
    reason = pod.annotations.get(LEAVE) or next(
        causes[kind.name] for kind in KINDS if kind.evicts and kind.name in causes
    )
    return Evict(*pod.identity, reason, node.precondition if node else None)


def _hindrance(node: SlurmNode, slurm: SlurmView) -> str:
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
MINUTE_S, NEWS = 60.0, 8


@dataclass(frozen=True, slots=True)
class Decision:
    changes: tuple[Change, ...]
    # All present notices, and the new ones among them.
    notices: tuple[Notice, ...]
    news: tuple[Notice, ...]
    memory: FleetMemory
    mistake: str = ""  # the traceback of a bug that prevented the decision


def decide(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    kubernetes, slurm = snapshot.kubernetes, snapshot.slurm
    notices: list[Notice] = []
    if snapshot.clocks:
        notices.append(
            Notice(
                "fleet",
                "clock",
                f"{snapshot.clocks}: until you correct it, the fleet gives up no machine and no deadline ends",
            )
        )
        policy = without_deadlines(policy)
    if isinstance(kubernetes, Unknown) or isinstance(slurm, Unknown):
        sides = (("Kubernetes", kubernetes), ("Slurm", slurm))
        notices += [Notice(name, "unknown", side.why) for name, side in sides if isinstance(side, Unknown)]
        if isinstance(kubernetes, Unknown):
            return finish(memory, notices, (), memory, now)
        return _without_slurm(snapshot, kubernetes, memory, now, policy, notices)
    goals = remediation.derive_goals(snapshot, now, policy)
    # With a wrong clock, waiting and idle times are unknown.
    pool_world, pool_slurm = (
        (_undated(kubernetes), replace(slurm, pending=None)) if snapshot.clocks else (kubernetes, slurm)
    )
    pool_plan = plan_pools(
        snapshot.workers(), pool_world, pool_slurm, now, policy, memory.idle_nodes_since, memory.refused
    )
    changes = _sort_out(
        notices,
        _unread(kubernetes, slurm),
        _actions(snapshot, kubernetes, slurm, memory, now, policy, goals, pool_plan=pool_plan),
        fencing.plan_fencing(kubernetes, slurm, snapshot.proofs, policy, now),
        conditions.show_pages(kubernetes, snapshot.pages),
    )
    changes, refused = _not_refused(changes, memory, now)
    changes = pods_in_turn(changes, refused, memory.paces)
    changes.sort(
        key=lambda change: (
            isinstance(change, LAST),
            not getattr(change, "urgent", False),
            action_key(change) in refused,
            _is_creation(change),
        )
    )
    admitted_changes = _within_rate(changes, refused, policy, notices)
    workers = list(snapshot.workers())
    after = FleetMemory(
        absent={node.name: memory.absent.get(node.name, now) for node in awake_orphans(snapshot)},
        lost=remember_lost_pods(snapshot, memory.lost, admitted_changes, now),
        marks=_marks(memory, workers, kubernetes, now, policy, goals, pool_plan),
        moved=topology.remember_places(workers, memory.moved, now) if policy.topology.is_set else {},
        refused=refused,
        idle_nodes_since=pool_plan.idle_nodes_since,
        paces={name: pace for name, pace in memory.paces.items() if name in (kubernetes.pools or {})},
    )
    return finish(memory, notices, admitted_changes, after, now)


def _without_slurm(
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
        fencing.plan_fencing(kubernetes, slurm, snapshot.proofs, policy, now),
        conditions.show_outage(kubernetes, since, now, policy),
        conditions.show_slinky_busy(kubernetes, policy),
        conditions.show_pages(kubernetes, snapshot.pages),
    )
    changes, refused = _not_refused(changes, memory, now)
    changes.sort(key=lambda change: isinstance(change, LAST))
    admitted_changes = _within_rate(changes, refused, policy, notices)
    return finish(memory, notices, admitted_changes, replace(memory, slurm_silent_since=since), now)


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


def _is_creation(change: Change) -> bool:
    return isinstance(change, CreatePod)


def pods_in_turn(changes: Iterable[Change], refused: Container[Key], paces: Mapping[str, int]) -> list[Change]:
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
        creations.sort(key=lambda creation: action_key(creation) in refused)
        turns += enumerate(creations[: paces.get(name, len(creations))])
    turns.sort(key=lambda turn: turn[0])
    return [*rest, *(creation for _, creation in turns)]


def _not_refused(
    changes: list[Change], memory: FleetMemory, now: float
) -> tuple[list[Change], dict[Key, RefusedChange]]:
    """Drop changes in backoff; also return the refusals of changes that are still due."""
    due = {action_key(change) for change in changes}
    refused = {key: refusal for key, refusal in memory.refused.items() if key in due}
    waiting = {key for key, refusal in refused.items() if now < refusal.until}
    return [change for change in changes if action_key(change) not in waiting], refused


def _within_rate(
    changes: list[Change], refused: Mapping[Key, RefusedChange], policy: Policy, notices: list[Notice]
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


def without_deadlines(policy: Policy) -> Policy:
    """Disable all deadlines; existing drains for a deadline stay."""
    never = float("inf")
    within = policy.leave_within_s and never
    lend = replace(policy.lend, notice_s=never)
    return replace(policy, dead_s=never, not_ready_s=never, leave_within_s=within, lend=lend)


def _undated(kubernetes: KubernetesView) -> KubernetesView:
    """Disable the pools' deadlines; a deadline of 0 depends on no clock and stays."""
    if kubernetes.pools is None:
        return kubernetes
    never = float("inf")
    timeless = {name: replace(pool, deadline_s=pool.deadline_s and never) for name, pool in kubernetes.pools.items()}
    return replace(kubernetes, pools=timeless)


def _actions(
    snapshot: FleetSnapshot,
    kubernetes: KubernetesView,
    slurm: SlurmView,
    memory: FleetMemory,
    now: float,
    policy: Policy,
    goals: remediation.Goals | None,
    *,
    pool_plan: PoolsPlan,
) -> Iterator[Action]:
    fencing_causes = fencing.fencing_causes(kubernetes, slurm, snapshot.proofs, policy, now)
    # While a worker's Node is unknown, so is the end of a cause.
    workers = {
        worker.name: (
            worker,
            {
                **find_causes(worker, policy, now),
                **fencing_causes.get(worker.pod.node, {}),
                **lost_causes(worker, slurm, memory.lost.get(worker.name), now, policy),
                **remediation.goal_causes(worker, goals, kubernetes),
                **pool_plan.causes.get(worker.name, {}),
            },
        )
        for worker in snapshot.workers()
        if worker.node is not None
    }
    unmanned = {
        node.name: (node, orphan_causes(now - memory.absent.get(node.name, now), policy))
        for node in awake_orphans(snapshot)
    }
    silent = [name for name, (worker, _) in workers.items() if worker.node and silent_for(worker.node, now) >= 0]
    causes_of_nodes = {name: (worker.slurm, worker_causes) for name, (worker, worker_causes) in workers.items()}
    limits = count_budget({**causes_of_nodes, **unmanned}, policy, [*silent, *unmanned])
    if limits.paused:
        yield _pause(limits, len(workers) + len(unmanned))
    missing = {pool: names - pool_plan.spare for pool, names in find_away(snapshot.workers()).items()}
    for name, (worker, worker_causes) in workers.items():
        admitted_causes = admit_causes(worker.slurm, worker_causes, limits)
        guard = protect(worker, slurm, admitted_causes)
        if name in pool_plan.named and isinstance(guard, Free):
            guard = None  # the next pass may withdraw the label: freeing it in each pass would never end
        drain_action = decide_drain(worker, admitted_causes, _mark(worker, memory))
        if isinstance(drain_action, Undrain) and conditions.shows_slinky_drain(worker.pod):
            drain_action = None  # programs that delete drained pods must see the end of the drain first
        is_ending = worker.slurm is not None and worker.slurm.by_fleet and not admitted_causes
        shown = (conditions.show_on_pod(worker), conditions.show_slinky_states(worker, slurm, policy, ends=is_ending))
        yield from filter(None, [drain_action, guard, *shown])
        yield from restart_slurmd(worker, slurm, memory.lost.get(name), now, policy)
        if pool_plan.pools_unknown or name in pool_plan.named:
            continue
        pods_away = missing.setdefault(worker.pod.pool, set())
        room = pool_plan.room(worker, len(pods_away) - (name in pods_away), policy)
        if (departure := leave(worker, slurm, admitted_causes, room)) is not None:
            yield departure
            if isinstance(departure, Evict):
                pods_away.add(name)
    for name, (node, causes_of_orphan) in unmanned.items():
        counted = admit_causes(node, causes_of_orphan, limits)
        yield from filter(None, [decide_orphan(node, slurm, counted, will_exist=kubernetes.will_exist(name))])
    yield from _on_nodes(kubernetes, (worker for worker, _ in workers.values()), policy, goals, limits)
    yield from pool_plan.actions
    yield from report_rollouts(snapshot.workers(), kubernetes)
    if goals is not None:
        yield from remediation.cordons(goals)
        # Deadlines of remedies and times in the history wait for a trusted clock.
        if not snapshot.clocks:
            yield from remediation.record_machines(goals, kubernetes, slurm, now, policy, memory.refused)
    yield from _places(snapshot, memory, now, policy)


def _on_nodes(
    kubernetes: KubernetesView,
    workers: Iterable[Worker],
    policy: Policy,
    goals: remediation.Goals | None,
    limits: Budget,
) -> Iterator[Action]:
    """Set cordons and conditions of Nodes with workers, and remove conditions from Nodes without workers."""
    workers_on: dict[str, list[Worker]] = {}
    for worker in workers:
        workers_on.setdefault(worker.pod.node, []).append(worker)
    for name, workers_there in workers_on.items():
        node, goal = kubernetes.nodes[name], goals.of_node(name) if goals else remediation.UP
        # An unknown goal, or one that a pause suspends, lifts no cordon.
        if not kubernetes.machines_unknown and (goal.up or goal.person or not limits.paused):
            yield from filter(None, [conditions.follow_cordon(node, workers_there, policy, goal.text)])
        yield from filter(None, [conditions.show_on_node(node, workers_there, policy, kubernetes.fleet_mark)])
    occupied = {pod.node for pod in kubernetes.pods.values()}
    for node in kubernetes.nodes.values():
        shown = None if node.name in occupied else conditions.hide_on_node(node, policy, kubernetes.fleet_mark)
        if shown is not None and kubernetes.can_read_pods_on(node.name):
            yield shown


def _places(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Iterator[Action]:
    if policy.topology.is_set and any(worker.slurm and worker.slurm.topology is None for worker in snapshot.workers()):
        yield Notice("fleet", "topology", "Slurm before 25.05 takes no places; see `fleet topology` for a file")
    elif domains := topology.unlisted_domains(snapshot.workers(), policy.topology):
        missing = first_of(domains, 3, ", ")
        yield Notice(
            "fleet", "topology", f"workers are in no block; add their domains to topology.blocks.domains: {missing}"
        )
    for worker in snapshot.workers():
        if (change := topology.due_place(worker, policy.topology)) is None:
            continue
        if topology.is_restless(memory.moved.get(worker.name), now):
            yield Notice(
                worker.name,
                "topology",
                "changed its place too often; the fleet sets it again after an hour without changes",
            )
        else:
            yield change


def _pause(limits: Budget, total: int) -> Notice:
    # Without the present number: a new text would be reported in each pass.
    unwell = f"more than {limits.most} of {total} workers have unwell machines, probably for a common cause"
    return Notice("fleet", "pause", f"{unwell}: the fleet drains no other worker for that until fewer are unwell")


def _unread(kubernetes: KubernetesView, slurm: SlurmView) -> Iterator[Notice]:
    for name, why in {**kubernetes.unread, **{f"Slurm/{name}": why for name, why in slurm.unread.items()}}.items():
        yield Notice(name, "unread", why)
    for name, why in slurm.doubts.items():
        effect = "the fleet evicts, removes, lends and shrinks nothing that depends on it"
        yield Notice("fleet", "unread", f"Slurm's {name} cannot be read, so {effect}: {why}")


def _mark(worker: Worker, memory: FleetMemory) -> Mark | None:
    if worker.slurm is None:
        return None
    return worker.slurm.mark or (None if is_free_comment(worker.slurm.comment) else memory.marks.get(worker.name))


def _marks(
    memory: FleetMemory,
    workers: Iterable[Worker],
    kubernetes: KubernetesView,
    now: float,
    policy: Policy,
    goals: remediation.Goals | None,
    pool_plan: PoolsPlan,
) -> Mapping[str, Mark]:
    """Remember marks that a person's comment displaces in Slurm, as long as their causes last."""
    marks = {}
    for worker in workers:
        if worker.slurm is not None and not is_free_comment(worker.slurm.comment):
            mark = worker.slurm.mark if worker.slurm.by_fleet else memory.marks.get(worker.name)
            if mark is not None and (
                worker.node is None
                or find_causes(worker, policy, now)
                or remediation.goal_causes(worker, goals, kubernetes)
                or worker.name in pool_plan.causes
            ):
                marks[worker.name] = mark
    return marks


def finish(
    memory: FleetMemory,
    notices: Iterable[Notice],
    changes: tuple[Change, ...],
    after: FleetMemory,
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
        key: replace(before, texts=frozenset())
        for key, before in memory.reported.items()
        if key not in by_key and now - before.since < MINUTE_S
    }
    news: list[Notice] = []
    for key, current in by_key.items():
        before = memory.reported.get(key, NoticeHistory(since=now))
        fresh = [notice for notice in current if notice.text not in before.texts]
        if fresh and now - before.since >= MINUTE_S:
            before = replace(before, since=now, times=0)
        if fresh and before.times >= NEWS:
            histories[key] = before  # reported in a later minute, if it still holds
            continue
        news += fresh
        texts = frozenset(notice.text for notice in current)
        histories[key] = NoticeHistory(texts, before.since, before.times + bool(fresh))
    return Decision(changes, notices, tuple(news), replace(after, reported=histories), mistake)


MISTAKE = "mistake"
FRAMES, MOST_ERROR = 8, 512


def decide_safely(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    """Decide; after a bug return a decision that holds only a notice, and in `mistake` the traceback for the log.

    Drop the memory except for reported notices: it may trigger the bug, and losing it is always safe.
    """
    try:
        return decide(snapshot, memory, now, policy)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__, -FRAMES)
        what = one_line(f"{type(error).__name__}: {error}")[:MOST_ERROR]
        last = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
        text = f"nothing is decided: {what} ({last}): a bug of the fleet; report the traceback in its log"
        trace = "".join(traceback.format_list(frames)) + what
        return finish(memory, [Notice("fleet", MISTAKE, text)], (), FleetMemory(), now, mistake=trace)


def mistake_text(decision: Decision) -> str:
    """Return the text of the bug's notice; empty: no bug."""
    return next((notice.text for notice in decision.notices if notice.kind == MISTAKE), "") if decision.mistake else ""


@dataclass(slots=True)
class Backoff:
    """The pause after a bug, longer each time: the next snapshot may not trigger it."""

    times: int = 0
    until: float = 0.0
    why: str = ""

    def update(self, decision: Decision, now: float) -> None:
        self.why = mistake_text(decision)
        if not self.why:
            self.times, self.until = 0, 0.0
            return
        self.until = now + backoff(RETRY_S, self.times, LONGEST_RETRY_S)
        self.times += 1

    def waits(self, now: float) -> bool:
        return now < self.until
