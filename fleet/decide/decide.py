"""The whole of it: what both sides say in; what to do, and what to tell, out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fleet.decide import conditions, fencing, goals, orphans, topology, unregistered
from fleet.decide.actions import (
    Action,
    Adopt,
    CallHook,
    Change,
    CreatePod,
    Evict,
    Free,
    HideOnNode,
    Key,
    Make,
    NotePool,
    Notice,
    Protect,
    Record,
    ShowOnNode,
    ShowOnPod,
    Undrain,
    action_key,
)
from fleet.decide.budget import Budget, admitted, away, budget, shared
from fleet.decide.causes import causes, silent_for
from fleet.decide.conditions import beside, no_longer, on_node, on_pod
from fleet.decide.drain import hold
from fleet.decide.eviction import leave, protect
from fleet.decide.memory import Memory, NoticeHistory, Refused
from fleet.decide.pools.pools import Pools, pools
from fleet.decide.pools.rollout import rollouts
from fleet.decide.topology import Place
from fleet.policy import Policy
from fleet.reasons import Mark, free
from fleet.world.kubernetes import Kubernetes
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Proof, Snapshot, Unknown, Worker


def in_turn(changes: Iterable[Change], refused: Container[Key], paces: Mapping[str, int]) -> list[Change]:
    """One of each pool's, then the second of each, after all else. `paces`: of which pool no more than so many."""
    rest: list[Change] = []
    found: dict[str, list[CreatePod]] = {}
    for change in changes:
        if isinstance(change, CreatePod):
            found.setdefault(change.pool.name, []).append(change)
        else:
            rest.append(change)
    turns: list[tuple[int, CreatePod]] = []
    for name, ones in found.items():
        # Those first that were not refused: what keeps one from coming may be its own matter.
        ones.sort(key=lambda one: action_key(one) in refused)
        turns += enumerate(ones[: paces.get(name, len(ones))])
    turns.sort(key=lambda turn: turn[0])
    return [*rest, *(one for _, one in turns)]


# What is only shown or made anew comes last: where nobody may write it, it must not keep a drain from its turn.
LAST = (ShowOnPod, ShowOnNode, HideOnNode, Make, Record, CallHook, Place, CreatePod, Adopt, NotePool)
# No job ends by these: there may be many at a time, and they do not wait for one another.
MANY = (Undrain, Protect, ShowOnPod, ShowOnNode, HideOnNode)
LOOK_S = 3.0
# So often a minute what is told about one thing may be another sentence.
MINUTE_S, NEWS = 60.0, 8


@dataclass(frozen=True, slots=True)
class Decision:
    changes: tuple[Change, ...]
    # What stands now, and what of it was not told before.
    stands: tuple[Notice, ...]
    news: tuple[Notice, ...]
    memory: Memory
    mistake: str = ""  # of ours, with where it was: then nothing is decided


def decide(world: Snapshot, memory: Memory, now: float, policy: Policy) -> Decision:
    kubernetes, slurm = world.kubernetes, world.slurm
    doubts = [Notice("fleet", "clock", f"{world.clocks}: no proof and no deadline counts")] if world.clocks else []
    policy = timeless(policy) if doubts else policy
    if isinstance(kubernetes, Unknown) or isinstance(slurm, Unknown):
        blind = [("Kubernetes", kubernetes), ("Slurm", slurm)]
        tells = [*doubts, *(Notice(side, "unknown", it.why) for side, it in blind if isinstance(it, Unknown))]
        if isinstance(kubernetes, Unknown):
            return told(memory, tells, (), memory, now)
        return _without_slurm(kubernetes, slurm, world.proofs, memory, now, policy, tells)
    tells, changes = doubts, []
    known = goals.goals(world, now, policy)
    # How long a job has waited and a node been idle is not known then, as where Slurm was not asked.
    here, timed = (_undated(kubernetes), replace(slurm, pending=None)) if doubts else (kubernetes, slurm)
    rolls = pools(world.workers(), here, timed, now, policy, memory.fed, memory.refused)
    for action in [
        *_unread(kubernetes, slurm),
        *_actions(world, kubernetes, slurm, memory, now, policy, known, rolls),
        *fencing.fence(kubernetes, slurm, world.proofs, policy, now),
    ]:
        if isinstance(action, Notice):
            tells.append(action)
        else:
            changes.append(action)
    changes, refused = _not_refused(changes, memory, now)
    changes = in_turn(changes, refused, memory.paces)
    changes.sort(
        key=lambda change: (isinstance(change, LAST), action_key(change) in refused, isinstance(change, CreatePod))
    )
    made = _within_rate(changes, refused, policy, tells)
    absent = {node.name: memory.absent.get(node.name, now) for node in orphans.awake(world)}
    missed = unregistered.remembered(world, memory.lost, made, now)
    marks = _marks(memory, world, kubernetes, now, policy, known, rolls)
    paces = {name: pace for name, pace in memory.paces.items() if name in (kubernetes.pools or {})}
    moved = topology.remembered(world.workers(), memory.moved, now) if policy.topology.told else {}
    return told(memory, tells, made, Memory({}, absent, missed, marks, moved, refused, rolls.fed, paces), now)


def _without_slurm(
    kubernetes: Kubernetes,
    slurm: Slurm | Unknown,
    proofs: Mapping[str, Proof],
    memory: Memory,
    now: float,
    policy: Policy,
    tells: list[Notice],
) -> Decision:
    """Decide what needs no answer of slurmctld: its own controller may lie on a dead machine, and states go stale."""
    since = memory.slurm_silent_since or now
    changes: list[Change] = []
    for action in [
        *fencing.fence(kubernetes, slurm, proofs, policy, now),
        *conditions.show(kubernetes, since, now, policy),
    ]:
        if isinstance(action, Notice):
            tells.append(action)
        else:
            changes.append(action)
    changes, refused = _not_refused(changes, memory, now)
    changes.sort(key=lambda change: isinstance(change, LAST))
    made = _within_rate(changes, refused, policy, tells)
    return told(memory, tells, made, replace(memory, slurm_silent_since=since), now)


def _not_refused(changes: list[Change], memory: Memory, now: float) -> tuple[list[Change], dict[Key, Refused]]:
    """Leave out the changes that wait for their retry, so that the rest get their turn; and what was refused of those
    that are still due."""
    due = {action_key(change) for change in changes}
    refused = {key: refusal for key, refusal in memory.refused.items() if key in due}
    return [change for change in changes if not _waits(refused.get(action_key(change)), now)], refused


def _within_rate(
    changes: list[Change], refused: Mapping[Key, Refused], policy: Policy, tells: list[Notice]
) -> tuple[Change, ...]:
    """As many changes as the policy allows in one pass; says so in `tells` where more are due."""
    most, many = policy.changes, int(policy.rate * LOOK_S)
    careful = [change for change in changes if not isinstance(change, MANY)]
    light = [change for change in changes if isinstance(change, MANY)]
    if len(careful) > most or len(light) > many:
        limit = most if len(careful) > most else many
        tells.append(Notice("fleet", "rate", f"more than {limit} changes are due: the rest follow"))
    return (*shared(careful, refused, most), *shared(light, refused, many))


def _waits(refused: Refused | None, now: float) -> bool:
    return refused is not None and now < refused.until


def timeless(policy: Policy) -> Policy:
    """What is done because time has passed is not due; what stands for it stays."""
    never = float("inf")
    within = policy.leave_within_s and never
    lend = replace(policy.lend, notice_s=never)
    return replace(policy, dead_s=never, not_ready_s=never, leave_within_s=within, lend=lend)


def _undated(kubernetes: Kubernetes) -> Kubernetes:
    """The same of pools: "now" is no time that has passed."""
    never = {
        name: replace(pool, within_s=pool.within_s and float("inf")) for name, pool in (kubernetes.pools or {}).items()
    }
    return replace(kubernetes, pools=None if kubernetes.pools is None else never)


def _actions(
    world: Snapshot,
    kubernetes: Kubernetes,
    slurm: Slurm,
    memory: Memory,
    now: float,
    policy: Policy,
    known: goals.Goals | None,
    rolls: Pools,
) -> Iterator[Action]:
    dead = fencing.causes(kubernetes, slurm, world.proofs, policy, now)
    # Of a worker whose Node is not known it is not known either whether a cause is gone.
    workers = {
        one.name: (
            one,
            {
                **causes(one, policy, now),
                **dead.get(one.pod.node, {}),
                **unregistered.causes(one, slurm, memory.lost.get(one.name), now, policy),
                **goals.causes(one, known, kubernetes),
                **rolls.causes.get(one.name, {}),
            },
        )
        for one in world.workers()
        if one.node is not None
    }
    unmanned = {
        one.name: (one, orphans.causes(now - memory.absent.get(one.name, now), policy)) for one in orphans.awake(world)
    }
    silent = [name for name, (one, _) in workers.items() if one.node and silent_for(one.node, now) >= 0]
    held = {name: (one.slurm, found) for name, (one, found) in workers.items()}
    limits = budget({**held, **unmanned}, policy, [*silent, *unmanned])
    if limits.paused:
        yield _pause(limits, len(workers) + len(unmanned))
    absent = {pool: out - rolls.spare for pool, out in away(world.workers()).items()}
    for name, (worker, found) in workers.items():
        mark = _mark(worker, memory)
        count = admitted(worker.slurm, found, limits)
        guard = protect(worker, slurm, count)
        if name in rolls.named and isinstance(guard, Free):
            guard = None  # it may be taken back just now: who is freed in each look in between never is
        yield from filter(None, [hold(worker, count, mark), guard, on_pod(worker)])
        yield from unregistered.restart(worker, slurm, memory.lost.get(name), now, policy)
        if rolls.unsure or name in rolls.named:
            continue
        out = absent.setdefault(worker.pod.pool, set())
        if (going := leave(worker, slurm, count, rolls.room(worker, len(out) - (name in out), policy))) is not None:
            yield going
            if isinstance(going, Evict):
                out.add(name)
    for name, (node, why) in unmanned.items():
        yield from filter(None, [orphans.gone(node, slurm, admitted(node, why, limits), made=kubernetes.made(name))])
    here: dict[str, list[Worker]] = {}
    for worker, _ in workers.values():
        here.setdefault(worker.pod.node, []).append(worker)
    for name, on in here.items():
        machine = kubernetes.nodes[name]
        goal = known.of_node(name) if known else goals.UP
        # What is not known, or not begun in a pause, is not lifted either.
        if not kubernetes.blind and (goal.up or goal.person or not limits.paused):
            yield from filter(None, [on_node(machine, on, policy, goal.words)])
        yield from filter(None, [beside(machine, on, policy, kubernetes.whose)])
    taken = {pod.node for pod in kubernetes.pods.values()}
    for there in kubernetes.nodes.values():
        shown = None if there.name in taken else no_longer(there, policy, kubernetes.whose)
        if shown is not None and kubernetes.sees(there.name):
            yield shown
    yield from rolls.actions
    yield from rollouts(world.workers(), kubernetes)
    if known is not None:
        yield from goals.cordons(known)
        # Whether a remedy has helped in its time, and what else is noted with the hour, waits for the right one.
        yield from () if world.clocks else goals.kept(known, kubernetes, slurm, now, policy, memory.refused)
    yield from _places(world, memory, now, policy)


def _places(world: Snapshot, memory: Memory, now: float, policy: Policy) -> Iterator[Action]:
    if policy.topology.told and any(one.slurm and one.slurm.topology is None for one in world.workers()):
        yield Notice("fleet", "topology", "this release of Slurm is told no places of nodes: from 25.05 on it is")
    elif domains := topology.blockless(world.workers(), policy.topology):
        more = f" and {len(domains) - 3} more" if len(domains) > 3 else ""
        named = f"{', '.join(domains[:3])}{more}"
        yield Notice("fleet", "topology", f"workers in no block: topology.blocks.domains does not name {named}")
    for worker in world.workers():
        if (found := topology.due(worker, policy.topology)) is None:
            continue
        if topology.restless(memory.moved.get(worker.name), now):
            yield Notice(worker.name, "topology", "was elsewhere too often: its place waits for an hour of rest")
        else:
            yield found


def _pause(limits: Budget, total: int) -> Notice:
    # Not how many: that would be news at each look.
    many = f"of {total} workers more than {limits.most} have machines that are unwell"
    return Notice("fleet", "pause", f"{many}: no other is drained for that until they are fewer")


def _unread(kubernetes: Kubernetes, slurm: Slurm) -> Iterator[Notice]:
    for name, why in {**kubernetes.unread, **{f"Slurm/{name}": why for name, why in slurm.unread.items()}}.items():
        yield Notice(name, "unread", why)
    for name, why in slurm.doubts.items():
        waits = "nothing is evicted, removed, lent or shrunk for which it counts"
        yield Notice("fleet", "unread", f"of Slurm {name} is not known, and {waits}: {why}")


def _mark(worker: Worker, memory: Memory) -> Mark | None:
    if worker.slurm is None:
        return None
    return worker.slurm.mark or (None if free(worker.slurm.comment) else memory.marks.get(worker.name))


def _marks(
    memory: Memory,
    world: Snapshot,
    kubernetes: Kubernetes,
    now: float,
    policy: Policy,
    known: goals.Goals | None,
    rolls: Pools,
) -> Mapping[str, Mark]:
    """Those that have no place in Slurm, as they were last seen there; they end with their causes."""
    found = {}
    for worker in world.workers():
        if worker.slurm is not None and not free(worker.slurm.comment):
            mark = worker.slurm.mark if worker.slurm.ours else memory.marks.get(worker.name)
            if mark is not None and (
                worker.node is None
                or causes(worker, policy, now)
                or goals.causes(worker, known, kubernetes)
                or worker.name in rolls.causes
            ):
                found[worker.name] = mark
    return found


def told(
    memory: Memory, tells: Iterable[Notice], changes: tuple[Change, ...], after: Memory, now: float, mistake: str = ""
) -> Decision:
    """What others may write, a message of a condition, must not fill the log: so often a minute it is news."""
    stands = tuple(tells)
    said: dict[tuple[str, str], list[Notice]] = {}
    for one in stands:
        said.setdefault((one.about, one.kind), []).append(one)
    # What stands no more is remembered for that minute: it may come and go, too.
    kept = {
        key: replace(before, texts=frozenset())
        for key, before in memory.told.items()
        if key not in said and now - before.since < MINUTE_S
    }
    news: list[Notice] = []
    for key, ones in said.items():
        before = memory.told.get(key, NoticeHistory(since=now))
        fresh = [one for one in ones if one.text not in before.texts]
        if fresh and now - before.since >= MINUTE_S:
            before = replace(before, since=now, times=0)
        if fresh and before.times >= NEWS:
            kept[key] = before  # what is still so is told then
            continue
        news += fresh
        texts = frozenset(one.text for one in ones)
        kept[key] = NoticeHistory(texts, before.since, before.times + bool(fresh))
    return Decision(changes, stands, tuple(news), replace(after, told=kept), mistake)
