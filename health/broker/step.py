"""What the broker does next: its memory, what it sees and the hour in; its memory and actions out. Pure.

What only the controller or the ledger can say is asked for when it is needed: then the memory stays as it was, an
action asks, and whoever performs it puts the answer into the inputs and takes the step again. So a look is decided as
one, from all that it has learnt, and a step that is taken twice has the same outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from health.broker import decide
from health.broker.guard import guarded, within_rate
from health.broker.incidents import Enter, entry, judged
from health.broker.inputs import Gpu
from health.broker.memory import Log, Memory, Now, hold, is_over, unexpired
from health.index import Index
from health.policy import BrokerPolicy
from health.scripts import is_of_script
from health.spread import share
from health.verdict import Result, Verdict

RETRY_S = (5.0, 15.0, 60.0, 300.0)
# So often it is looked whether deep checks have ended.
DEEP_S = 30.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The controller could not be asked, or refused."""

    why: str


@dataclass(frozen=True, slots=True)
class Inputs:
    name: str
    policy: BrokerPolicy
    boot_id: str
    verdicts: tuple[Verdict, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    # The last round's of this boot; None: no check is known to be gone.
    index: Index | None = None
    # The published scripts of prologs and epilogs, by the name of their verdicts; None: not known.
    scripts: Mapping[str, str] | None = None
    # They have the machine for themselves, and a drain of ours keeps jobs from it.
    deep_runs: bool = False
    # The answers so far: how many incidents a check's GPU has had; the node; the other nodes; what came of a change.
    incidents: Mapping[str, int] = field(default_factory=dict)
    node: decide.Node | Failed | None = None
    fleet: decide.Fleet | Failed | None = None
    changed: decide.Act | Failed | None = None


@dataclass(frozen=True, slots=True)
class AskNode:
    pass


@dataclass(frozen=True, slots=True)
class AskFleet:
    pass


@dataclass(frozen=True, slots=True)
class Change:
    act: decide.Act


Action = Log | Enter | AskNode | AskFleet | Change
Outcome = tuple[Memory, tuple[Action, ...]]


def step(memory: Memory, inputs: Inputs, now: Now) -> Outcome:
    """Verdicts in, perhaps one change out."""
    after = _observed(memory, inputs, now)
    entries = _entries(memory, after, inputs, now)
    if unanswered := tuple(one for one in entries if one.check not in inputs.incidents):
        return memory, unanswered
    known = {one.check: judged(after.seen[one.check], one, inputs.incidents[one.check]) for one in entries}
    after = replace(after, seen={**after.seen, **known})
    standing = after.standing(now)
    if _differs(after, standing, inputs, now) and not after.due:
        # A whole fleet finds a bad commit's check at the same moment; each node waits its own part of the time, so that
        # the later ones see the earlier ones. A lone node's prolog is not kept waiting for that.
        spread = inputs.policy.guard_spread_s if standing and not after.drained else 0.0
        after = replace(after, due=now.steady + spread * share(inputs.name))
    if is_over(after.due, now):
        return _act(memory, after, inputs, now)
    if is_over(after.recheck, now):
        return _recheck(memory, after, inputs, now)
    return after, ()


def _observed(memory: Memory, inputs: Inputs, now: Now) -> Memory:
    counted = next((item for item in inputs.verdicts if item.check == "gpu_count"), None)
    verdicts = [verdict for verdict in inputs.verdicts if not _is_void(verdict, inputs.scripts)]
    complete = counted is not None and counted.result is Result.OK and bool(inputs.gpus)
    present = frozenset(gpu.uuid for gpu in inputs.gpus) if complete else None
    with_jobs, once = (inputs.index.with_jobs, inputs.index.once) if inputs.index else (frozenset(), frozenset())
    seen = decide.observe(memory.seen, verdicts, inputs.policy, now.wall, inputs.boot_id, present, with_jobs, once)
    alive = {check: one for check, one in seen.items() if not _is_gone(check, inputs)}
    return replace(memory, seen=alive, held=unexpired(memory.held, now))


def _entries(memory: Memory, after: Memory, inputs: Inputs, now: Now) -> list[Enter]:
    """The problems that begin here and are about a GPU."""
    before, evidence = decide.raised(memory.seen), {item.check: item.evidence for item in inputs.verdicts}
    new = {check: seen for check, seen in decide.raised(after.seen).items() if check not in before}
    entries = (
        entry(check, seen, evidence.get(check, ""), inputs.name, inputs.gpus, inputs.policy, now.wall)
        for check, seen in new.items()
    )
    return [one for one in entries if one is not None]


def _is_void(verdict: Verdict, scripts: Mapping[str, str] | None) -> bool:
    """Whether a script's verdict ended with its script: removed from the published tree, or replaced by another text.

    A drained node runs no prolog, so the script itself can never take its word back.
    """
    if scripts is None or not is_of_script(verdict.check):
        return False
    now = scripts.get(verdict.check)
    return now is None or bool(verdict.digest and now and verdict.digest != now)


def _is_gone(check: str, inputs: Inputs) -> bool:
    """Whether the check is no longer in the tree, and has no verdict that counts.

    A script that has said nothing since the pod began is as good as gone: on a drained node it does not run.
    """
    if any(item.check == check and not _is_void(item, inputs.scripts) for item in inputs.verdicts):
        return False
    return is_of_script(check) or (inputs.index is not None and check not in inputs.index.checks)


def _kept(memory: Memory, text: str, inputs: Inputs, now: Now) -> dict[str, str]:
    def dead(check: str) -> bool:
        return check in memory.forgotten or _is_gone(check, inputs)

    return decide.unreleased(text, memory.seen, memory.held, inputs.policy, now.wall, dead)


def _differs(memory: Memory, standing: Mapping[str, decide.Seen], inputs: Inputs, now: Now) -> bool:
    """Whether another thing stands than when we last acted, or what is posted says more than what is true."""
    live = decide.reason(standing, decide.left(standing, _kept(memory, memory.posted, inputs, now)))
    return names_of(standing) != memory.acted_on or not decide.names(memory.posted) <= decide.names(live)


def _act(memory: Memory, after: Memory, inputs: Inputs, now: Now) -> Outcome:
    standing = after.standing(now)
    logs: tuple[Log, ...] = ()
    match inputs.node:
        case None:
            return memory, (AskNode(),)
        case Failed(why):
            return _again(after, why, now)
        case node:
            after = replace(after, found=after.found or node)
    kept = _kept(after, node.reason, inputs, now)
    act = decide.decide(standing, node, kept)
    if act.kind in {"drain", "update"}:
        match inputs.fleet:
            case None:
                return memory, (AskFleet(),)
            case Failed(why):
                return _again(after, why, now)
            case fleet:
                pass
        many = guarded(standing, fleet.others, fleet.total, inputs.policy, now.wall)
        logs = tuple(
            Log(f"{standing[check].name(check)} stands on too many nodes: this one is not drained for it"
                f" ({standing[check].reason})") for check in sorted(many)
        )  # fmt: skip
        after = hold(after, many, now.wall + inputs.policy.guard_lasts_s)
        standing = after.standing(now)
        act = decide.decide(standing, node, _kept(after, node.reason, inputs, now))
    if act.kind == "nothing":
        ours = node.reason if node.drained and node.ours else ""
        return _acted(replace(after, drained=node.drained, posted=ours), standing, act), logs
    if act.kind == "clear" and inputs.deep_runs:
        said = "deep checks run: the drain ends after them"
        return replace(after, said=said, drained=True, posted=node.reason, due=now.steady + DEEP_S), logs
    if not within_rate(after.changes, inputs.policy, now.steady):
        said = f"too many changes within {inputs.policy.rate_per_s:g} s: waits ({act.kind}: {act.text})"
        return replace(after, said=said, due=now.steady + inputs.policy.rate_per_s / inputs.policy.rate_actions), logs
    match inputs.changed:
        case None:
            return memory, (*logs, Log(f"{act.kind} {inputs.name}: {act.text}"), Change(act))
        case Failed(why):
            return _again(after, why, now)
    recent = (at for at in after.changes if at > now.steady - inputs.policy.rate_per_s)
    after = replace(after, changes=(*recent, now.steady))
    if act.kind == "clear":
        return _acted(replace(after, drained=False, posted="", recheck=0.0), standing, act), ()
    recheck = now.steady + inputs.policy.guard_recheck_s
    return _acted(replace(after, drained=True, posted=act.text, recheck=recheck), standing, act), ()


def _acted(memory: Memory, standing: Mapping[str, decide.Seen], act: decide.Act) -> Memory:
    said = f"{act.kind}: {act.text}"
    return replace(memory, said=said, acted_on=names_of(standing), due=0.0, failures=0, forgotten=frozenset())


def _again(memory: Memory, why: str, now: Now) -> Outcome:
    pause = RETRY_S[min(memory.failures, len(RETRY_S) - 1)]
    later = replace(memory, said=why, due=now.steady + pause, failures=memory.failures + 1)
    return later, (Log(f"{why}: again in {pause:.0f} s"),)


def _recheck(memory: Memory, after: Memory, inputs: Inputs, now: Now) -> Outcome:
    """Once after a drain: did the rest of the fleet say the same at the same moment?"""
    standing, after = after.standing(now), replace(after, recheck=0.0)
    match inputs.fleet:
        case None:
            return memory, (AskFleet(),)
        case Failed(why):
            return after, (Log(f"{why}: the drain stands"),)
        case fleet:
            pass
    many = guarded(standing, fleet.others, fleet.total, inputs.policy, now.wall)
    if not many:
        return after, ()
    after = hold(after, many, now.wall + inputs.policy.guard_lasts_s)
    said = f"{', '.join(sorted(many))} stand on too many nodes: the drain is taken back"
    return replace(after, due=now.steady), (Log(said),)


def names_of(standing: Mapping[str, decide.Seen]) -> frozenset[str]:
    return frozenset(seen.name(check) for check, seen in standing.items())
