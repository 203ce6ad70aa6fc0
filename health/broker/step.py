"""The broker's next step: memory, inputs and time in; memory and actions out. Pure functions.

A step that needs an answer of slurmctld or the ledger returns an action that asks, and leaves the memory unchanged. The
caller adds the answer to the inputs and repeats the step. So one step decides from all answers together, and a repeated
step has the same outcome.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from health.broker import decide, slurm_drains
from health.broker.decide import PREFIX, BrokerNode, Enter, Gpu, Other, Seen, entry, judged, parts, raised, reason
from health.broker.slurm_drains import EXPECTED_S, SOON_S, SlurmDrainWatch
from health.policy import BrokerPolicy, share
from health.rounds import Index
from health.verdict import Result, Verdict, is_of_script, is_void

# A person's resume holds for a day; a problem that still exists then drains again.
RESUMED_LASTS_S = 86400.0


@dataclass(frozen=True, slots=True)
class Now:
    # For verdicts and held problems, whose times other processes share.
    wall: float
    # For everything that is due, so that setting the clock delays no drain; never 0, which means "no time".
    steady: float


@dataclass(frozen=True, slots=True)
class Memory:
    seen: Mapping[str, Seen] = field(default_factory=dict)
    # check@commit -> time until which it drains nothing: too many nodes have it, or a person resumed the node.
    held: Mapping[str, float] = field(default_factory=dict)
    # Checks that a person discarded, until they report again.
    forgotten: frozenset[str] = frozenset()
    # Times of changes to the node, by the steady clock.
    changes: tuple[float, ...] = ()
    # Problems at the last action: while they are the same, the broker asks nothing.
    acted_on: frozenset[str] | None = None
    drained: bool = False
    # The node's reason at the last look, if the broker wrote it.
    posted: str = ""
    said: str = "starting"
    # The node as this pod found it; None: not known yet.
    found: BrokerNode | None = None
    # When to act, and when to look at the fleet again, by the steady clock; 0: never.
    due: float = 0.0
    recheck: float = 0.0
    failures: int = 0
    # Slurm's own drains, the text about the present one in the pod's status, and until when one is expected.
    slurm: SlurmDrainWatch = field(default_factory=SlurmDrainWatch)
    slurm_drain: str = ""
    expected: float = 0.0
    # Time of slurmctld's last answer about the node.
    looked: float = 0.0

    def standing(self, now: Now) -> dict[str, Seen]:
        """Return the raised problems that are not held."""
        released = unexpired(self.held, now)
        return {check: seen for check, seen in raised(self.seen).items() if seen.key(check) not in released}


@dataclass(frozen=True, slots=True)
class Log:
    text: str


def resumed(memory: Memory, now: Now) -> tuple[Memory, tuple[Log, ...]]:
    """Hold the problems of a node that the broker drained and a person resumed: they do not drain it again."""
    text = "a person resumed the node: its problems until now no longer drain it"
    after = hold(memory, memory.standing(now), now.wall + RESUMED_LASTS_S)
    return replace(after, drained=False, posted="", said=text), (Log(text),)


def forget(memory: Memory, named: Iterable[str]) -> tuple[Memory, tuple[Log, ...]]:
    """Discard the state of these checks on a person's request; later verdicts count again."""
    checks = frozenset(named)
    return replace(
        memory,
        seen={check: seen for check, seen in memory.seen.items() if check not in checks},
        held={key: until for key, until in memory.held.items() if key.split("@")[0] not in checks},
        forgotten=memory.forgotten | checks,
        acted_on=None,
    ), tuple(Log(f"{check} is forgotten on a person's request") for check in sorted(checks))


def expect_drain(memory: Memory, now: Now) -> Memory:
    """Look at the node soon and repeatedly, because Slurm is about to drain it, or may be."""
    soon = now.steady + SOON_S
    due = min(memory.due, soon) if memory.due else soon
    return replace(memory, expected=now.steady + EXPECTED_S, due=due)


def what_of(memory: Memory, check: str, now: Now) -> str:
    """Describe a check's state, for a prolog's record and for people."""
    seen = memory.seen.get(check, Seen())
    if check in memory.standing(now):
        return "drained" if memory.drained else "about to drain"
    if seen.key(check) in unexpired(memory.held, now):
        return "held back: too many nodes have the same problem, or a person resumed the node"
    return "seen, not long enough" if seen.problems else "not seen"


def is_restless(memory: Memory) -> bool:
    """Tell if time alone may change the state; otherwise a look waits for another verdict."""
    waiting = any(seen.oks for seen in memory.seen.values() if seen.raised)
    return waiting or bool(memory.posted) or bool(memory.due or memory.recheck)


def is_over(moment: float, now: Now) -> bool:
    return bool(moment) and now.steady >= moment


def unexpired(held: Mapping[str, float], now: Now) -> dict[str, float]:
    return {name: until for name, until in held.items() if until > now.wall}


def hold(memory: Memory, checks: Iterable[str], until: float) -> Memory:
    return replace(memory, held={**memory.held, **{memory.seen[check].key(check): until for check in checks}})


# Reasons are truncated; compare this many words.
WORDS_ALIKE = 8
DIGIT = re.compile("[0-9]")


def guarded(
    standing: Mapping[str, Seen], others: Iterable[Other], total: int, policy: BrokerPolicy, now: float
) -> frozenset[str]:
    """Return the standing checks that drained too many other nodes for what seems to be one cause.

    A commit with a bad check makes every node look unfit: it has never passed here, all report it within the hour, and
    in the same words. Hardware that breaks here and there shows none of these signs, however often. A node counts if
    two of the three signs hold, on the same commit.
    """
    counts = dict.fromkeys(standing, 0)
    for other in others:
        recent = other.since is None or now - other.since < policy.guard_window_s
        for check, _, commit, part in parts(other.reason):
            seen = standing.get(check)
            if seen is not None and seen.key(check) == f"{check}@{commit}":
                unproven = seen.passed != seen.commit
                counts[check] += unproven + recent + _alike(part, reason({check: seen})) >= 2
    limit = max(policy.guard_min_nodes, math.ceil(policy.guard_fraction * total))
    return frozenset(check for check, count in counts.items() if count >= limit)


def _alike(part: str, text: str) -> bool:
    """Compare the words, except those with a digit: numbers, addresses, names of parts."""
    words = [
        [word for word in sentence.split()[1:] if not DIGIT.search(word)][:WORDS_ALIKE]
        for sentence in (part, text[len(PREFIX) :].strip())
    ]
    # A part shortened to its name may match.
    return words[0] == words[1] or len(part.split()) == 1


def within_rate(actions: Iterable[float], policy: BrokerPolicy, now: float) -> bool:
    return sum(1 for at in actions if at > now - policy.rate_per_s) < policy.rate_actions


RETRY_S = (5.0, 15.0, 60.0, 300.0)
# Interval of looking whether deep checks have ended.
DEEP_S = 30.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The controller did not answer, or refused."""

    why: str


@dataclass(frozen=True, slots=True)
class BrokerInputs:
    name: str
    policy: BrokerPolicy
    boot_id: str
    verdicts: tuple[Verdict, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    # From the last round of this boot; None: no check is known to be gone.
    index: Index | None = None
    # Published prolog and epilog scripts, by the name of their verdicts; None: not known.
    scripts: Mapping[str, str] | None = None
    # Deep checks use the whole machine, and our drain keeps jobs off.
    deep_runs: bool = False
    # Answers so far: the incident count of a check's GPU; the node; the other nodes; the result of a change.
    incidents: Mapping[str, int] = field(default_factory=dict)
    node: decide.BrokerNode | Failed | None = None
    fleet: decide.Fleet | Failed | None = None
    changed: decide.Act | Failed | None = None
    # What a drain of Slurm's own has left on the node.
    remains: slurm_drains.Remains | None = None


@dataclass(frozen=True, slots=True)
class AskNode:
    pass


@dataclass(frozen=True, slots=True)
class AskFleet:
    pass


@dataclass(frozen=True, slots=True)
class AskRemains:
    pass


@dataclass(frozen=True, slots=True)
class ApplyAct:
    act: decide.Act


Action = Log | Enter | AskNode | AskFleet | AskRemains | ApplyAct
Outcome = tuple[Memory, tuple[Action, ...]]


def step(memory: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    """Decide: take in the verdicts and return at most one change."""
    after = _observed(memory, inputs, now)
    entries = _entries(memory, after, inputs, now)
    if unanswered := tuple(item for item in entries if item.check not in inputs.incidents):
        return memory, unanswered
    current = {item.check: judged(after.seen[item.check], item, inputs.incidents[item.check]) for item in entries}
    after = replace(after, seen={**after.seen, **current})
    standing = after.standing(now)
    if _differs(after, standing, inputs, now) and not after.due:
        # A bad commit's check fails on the whole fleet at the same moment. Each node waits for its own share of the
        # spread, so that later nodes see earlier drains. The prolog of a single node does not wait for that.
        spread = inputs.policy.guard_spread_s if standing and not after.drained else 0.0
        after = replace(after, due=now.steady + spread * share(inputs.name))
    if is_over(after.due, now):
        return _act(memory, after, inputs, now)
    if is_over(after.recheck, now):
        return _recheck(memory, after, inputs, now)
    return after, ()


def _observed(memory: Memory, inputs: BrokerInputs, now: Now) -> Memory:
    counted = next((item for item in inputs.verdicts if item.check == "gpu_count"), None)
    verdicts = [verdict for verdict in inputs.verdicts if not is_void(verdict, inputs.scripts)]
    complete = counted is not None and counted.result is Result.OK and bool(inputs.gpus)
    present = frozenset(gpu.uuid for gpu in inputs.gpus) if complete else None
    with_jobs, once = (inputs.index.with_jobs, inputs.index.once) if inputs.index else (frozenset(), frozenset())
    seen = decide.observe(memory.seen, verdicts, inputs.policy, now.wall, inputs.boot_id, present, with_jobs, once)
    alive = {check: state for check, state in seen.items() if not _is_gone(check, inputs)}
    return replace(memory, seen=alive, held=unexpired(memory.held, now))


def _entries(memory: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> list[Enter]:
    """Return the new problems that concern a GPU."""
    before, evidence = decide.raised(memory.seen), {item.check: item.evidence for item in inputs.verdicts}
    new = {check: seen for check, seen in decide.raised(after.seen).items() if check not in before}
    entries = (
        entry(check, seen, evidence.get(check, ""), inputs.name, inputs.gpus, inputs.policy, now.wall)
        for check, seen in new.items()
    )
    return [request for request in entries if request is not None]


def _is_gone(check: str, inputs: BrokerInputs) -> bool:
    """Tell if the check is no longer in the tree and has no valid verdict.

    A script without a verdict since the pod began counts as gone: it does not run on a drained node.
    """
    if any(item.check == check and not is_void(item, inputs.scripts) for item in inputs.verdicts):
        return False
    return is_of_script(check) or (inputs.index is not None and check not in inputs.index.checks)


def _kept(memory: Memory, text: str, inputs: BrokerInputs, now: Now) -> dict[str, str]:
    def dead(check: str) -> bool:
        return check in memory.forgotten or _is_gone(check, inputs)

    return decide.unreleased(text, memory.seen, memory.held, inputs.policy, now.wall, dead)


def _differs(memory: Memory, standing: Mapping[str, decide.Seen], inputs: BrokerInputs, now: Now) -> bool:
    """Tell if the problems differ from those at the last action, or if the posted reason names too many."""
    live = decide.reason(standing, decide.left(standing, _kept(memory, memory.posted, inputs, now)))
    return names_of(standing) != memory.acted_on or not decide.names(memory.posted) <= decide.names(live)


def _act(memory: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    match inputs.node:
        case None:
            return memory, (AskNode(),)
        case Failed(why):
            return _again(after, why, now)
        case node:
            after = replace(after, found=after.found or node, looked=now.steady)
    if cause := slurm_drains.cause_of(node):
        return _act_on_slurm(memory, after, cause, node, inputs, now)
    after = replace(after, slurm=replace(after.slurm, clean_since=0.0, posted=""), slurm_drain="")
    return _act_on_verdicts(memory, after, node, inputs, now)


def _act_on_verdicts(memory: Memory, after: Memory, node: decide.BrokerNode, inputs: BrokerInputs, now: Now) -> Outcome:
    standing = after.standing(now)
    logs: tuple[Log, ...] = ()
    unreleased = _kept(after, node.reason, inputs, now)
    act = decide.decide(standing, node, unreleased)
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
            Log(f"{standing[check].name(check)} has failed on too many nodes: this node is not drained for it"
                f" ({standing[check].reason})") for check in sorted(many)
        )  # fmt: skip
        after = hold(after, many, now.wall + inputs.policy.guard_lasts_s)
        standing = after.standing(now)
        act = decide.decide(standing, node, _kept(after, node.reason, inputs, now))
    if act.kind == "nothing":
        own_reason = node.reason if node.drained and node.is_own_drain else ""
        acted = _acted(replace(after, drained=node.drained, posted=own_reason), standing, act)
        is_expected = not node.drained and now.steady < after.expected
        return (replace(acted, due=now.steady + slurm_drains.AGAIN_S / 2) if is_expected else acted), logs
    if act.kind == "clear" and inputs.deep_runs:
        text = "deep checks are running: the drain ends after them"
        return replace(after, said=text, drained=True, posted=node.reason, due=now.steady + DEEP_S), logs
    if not within_rate(after.changes, inputs.policy, now.steady):
        text = f"too many changes within {inputs.policy.rate_per_s:g} s, waiting ({act.kind}: {act.text})"
        return replace(after, said=text, due=now.steady + inputs.policy.rate_per_s / inputs.policy.rate_actions), logs
    match inputs.changed:
        case None:
            return memory, (*logs, Log(f"{act.kind} {inputs.name}: {act.text}"), ApplyAct(act))
        case Failed(why):
            return _again(after, why, now)
    recent = (at for at in after.changes if at > now.steady - inputs.policy.rate_per_s)
    after = replace(after, changes=(*recent, now.steady))
    if act.kind == "clear":
        return _acted(replace(after, drained=False, posted="", recheck=0.0), standing, act), ()
    recheck = now.steady + inputs.policy.guard_recheck_s
    return _acted(replace(after, drained=True, posted=act.text, recheck=recheck), standing, act), ()


def _act_on_slurm(
    memory: Memory,
    after: Memory,
    cause: slurm_drains.SlurmDrainCause,
    node: decide.BrokerNode,
    inputs: BrokerInputs,
    now: Now,
) -> Outcome:
    """Lift a drain of Slurm's own from a clean node, tell what hangs, or put back the reason that it replaced."""
    if inputs.remains is None:
        return memory, (AskRemains(),)
    standing = after.standing(now)
    clean_since = 0.0 if inputs.remains.text else after.slurm.clean_since or now.steady
    watch = replace(after.slurm, clean_since=clean_since)
    act = slurm_drains.judge(cause, node, inputs.remains, watch, now.steady, inputs.name)
    if standing and act.kind == "clear":
        act = decide.Act("nothing", f"{node.reason}: stays while the node fails {', '.join(standing)}")
    after = replace(after, slurm=watch, slurm_drain=f"Slurm drained the node: {act.text}", drained=True, posted="")
    after = replace(_acted(after, standing, act), due=now.steady + slurm_drains.AGAIN_S)
    if act.kind == "nothing" or not within_rate(after.changes, inputs.policy, now.steady):
        return after, ()
    match inputs.changed:
        case None:
            return memory, (Log(f"{act.kind} {inputs.name}: {act.text}"), ApplyAct(act))
        case Failed(why):
            return _again(after, why, now)
    recent = (at for at in after.changes if at > now.steady - inputs.policy.rate_per_s)
    after = replace(after, changes=(*recent, now.steady))
    if act.kind == "update":
        return replace(after, slurm=replace(watch, posted=act.text)), ()
    lifts = (*(at for at in watch.lifts if now.steady - at < slurm_drains.WITHIN_S), now.steady)
    return replace(after, slurm=slurm_drains.SlurmDrainWatch(lifts=lifts), slurm_drain="", drained=False, due=0.0), ()


def _acted(memory: Memory, standing: Mapping[str, decide.Seen], act: decide.Act) -> Memory:
    text = f"{act.kind}: {act.text}"
    return replace(memory, said=text, acted_on=names_of(standing), due=0.0, failures=0, forgotten=frozenset())


def _again(memory: Memory, reason: str, now: Now) -> Outcome:
    pause = RETRY_S[min(memory.failures, len(RETRY_S) - 1)]
    later = replace(memory, said=reason, due=now.steady + pause, failures=memory.failures + 1)
    return later, (Log(f"{reason}: retrying in {pause:.0f} s"),)


def _recheck(memory: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    """Look once after a drain if the rest of the fleet reported the same problem at the same moment."""
    standing, after = after.standing(now), replace(after, recheck=0.0)
    match inputs.fleet:
        case None:
            return memory, (AskFleet(),)
        case Failed(why):
            return after, (Log(f"{why}: the drain stays"),)
        case fleet:
            pass
    many = guarded(standing, fleet.others, fleet.total, inputs.policy, now.wall)
    if not many:
        return after, ()
    after = hold(after, many, now.wall + inputs.policy.guard_lasts_s)
    text = f"{', '.join(sorted(many))} failed on too many nodes: the drain is withdrawn"
    return replace(after, due=now.steady), (Log(text),)


def names_of(standing: Mapping[str, decide.Seen]) -> frozenset[str]:
    return frozenset(seen.name(check) for check, seen in standing.items())
