"""Decide the broker's next step: memory, inputs and time in; memory and actions out. Pure functions.

The broker (`health.broker.broker`) calls `step` at each look. In order:

1. Take in the verdicts: which problems are raised now (`_take_in_verdicts`)?
2. Ask the ledger for the incidents of GPUs with new problems (`Enter`).
3. If the raised problems differ from those at the last action, set the time to act.
4. At that time ask slurmctld for the node (`AskNode`). For a drain that Slurm set itself, see `_act_on_slurm_drain`.
5. Otherwise compare the problems with the node's drain (`health.broker.decide`). Before a drain, ask for the other
   nodes (`AskOtherNodes`): a problem that many nodes report drains none of them (`find_widespread`).
6. Change the node (`ApplyAct`), within the rate limit.

A step that needs an answer returns an action that asks, and leaves the memory unchanged. The caller adds the answer to
the inputs and repeats the step. So one step decides from all answers together, and a repeated step has the same
outcome.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from health.broker import decide, slurm_drains
from health.broker.decide import (
    PREFIX,
    BrokerNode,
    Enter,
    Gpu,
    OtherNode,
    Seen,
    classify,
    entry,
    reason,
    select_raised,
    split_reason,
)
from health.broker.slurm_drains import EXPECTED_S, SOON_S, SlurmDrainWatch
from health.policy import BrokerPolicy, share
from health.rounds import Index
from health.verdict import Result, Verdict, is_of_script, is_void

# A person's resume holds for a day; a problem that still exists then drains again.
RESUMED_LASTS_S = 86400.0


@dataclass(frozen=True, slots=True)
class Now:
    """One moment by two clocks."""

    # For verdicts and held problems, whose times other processes share.
    wall: float
    # For everything that is due, so that setting the clock delays no drain; never 0, which means "no time".
    steady: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that the broker remembers between two steps."""

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
    status_text: str = "starting"
    # The node as slurmctld first described it to this pod; None: not known yet.
    node_at_start: BrokerNode | None = None
    # When to act, and when to look at the other nodes again, by the steady clock; 0: never.
    due: float = 0.0
    recheck: float = 0.0
    # When to look for a drain of Slurm's own, after jobs that ended soon after a look; 0: none has.
    jobs_look: float = 0.0
    failures: int = 0
    # Drains that Slurm set itself, the text about the present one in the pod's status, and until when one is expected.
    slurm: SlurmDrainWatch = field(default_factory=SlurmDrainWatch)
    slurm_drain: str = ""
    drain_expected_until: float = 0.0
    # Time of slurmctld's last answer about the node.
    node_read_at: float = 0.0

    def list_standing(self, now: Now) -> dict[str, Seen]:
        """Return the raised problems that are not held."""
        held = drop_expired(self.held, now)
        return {check: seen for check, seen in select_raised(self.seen).items() if seen.key(check) not in held}


@dataclass(frozen=True, slots=True)
class Log:
    text: str


def hold_resumed(memory: Memory, now: Now) -> tuple[Memory, tuple[Log, ...]]:
    """Hold the problems of a node that the broker drained and a person resumed: they do not drain it again."""
    text = "a person resumed the node: its problems until now no longer drain it"
    after = hold(memory, memory.list_standing(now), now.wall + RESUMED_LASTS_S)
    return replace(after, drained=False, posted="", status_text=text), (Log(text),)


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
    return replace(memory, drain_expected_until=now.steady + EXPECTED_S, due=due)


def describe_check(memory: Memory, check: str, now: Now) -> str:
    """Describe a check's state, for a prolog's record and for people."""
    seen = memory.seen.get(check, Seen())
    if check in memory.list_standing(now):
        return "drained" if memory.drained else "about to drain"
    if seen.key(check) in drop_expired(memory.held, now):
        return "held back: too many nodes have the same problem, or a person resumed the node"
    return "seen, not long enough" if seen.problems else "not seen"


def is_restless(memory: Memory) -> bool:
    """Tell if time alone may change the state; otherwise a look waits for another verdict."""
    has_problem_that_may_clear = any(seen.oks for seen in memory.seen.values() if seen.raised)
    return has_problem_that_may_clear or bool(memory.posted) or bool(memory.due or memory.recheck)


def is_due(moment: float, now: Now) -> bool:
    return bool(moment) and now.steady >= moment


def drop_expired(held: Mapping[str, float], now: Now) -> dict[str, float]:
    return {name: until for name, until in held.items() if until > now.wall}


def hold(memory: Memory, checks: Iterable[str], until: float) -> Memory:
    return replace(memory, held={**memory.held, **{memory.seen[check].key(check): until for check in checks}})


# Reasons are truncated; compare this many words.
WORDS_ALIKE = 8
DIGIT = re.compile("[0-9]")


def find_widespread(
    standing: Mapping[str, Seen], other_nodes: Iterable[OtherNode], total: int, policy: BrokerPolicy, now: float
) -> frozenset[str]:
    """Return the standing checks that drained too many other nodes for what seems to be one cause.

    A commit with a bad check makes every node look unfit: it has never passed here, all report it within the hour, and
    in the same words. Hardware that breaks here and there shows none of these signs, however often. A node counts if
    two of the three signs hold, on the same commit.
    """
    counts = dict.fromkeys(standing, 0)
    for node in other_nodes:
        is_recent = node.since is None or now - node.since < policy.guard_window_s
        for check, _, commit, part in split_reason(node.reason):
            seen = standing.get(check)
            if seen is not None and seen.key(check) == f"{check}@{commit}":
                never_passed_here = seen.passed != seen.commit
                signs = never_passed_here + is_recent + _is_alike(part, reason({check: seen}))
                counts[check] += signs >= 2
    limit = max(policy.guard_min_nodes, math.ceil(policy.guard_fraction * total))
    return frozenset(check for check, count in counts.items() if count >= limit)


def _is_alike(part: str, text: str) -> bool:
    """Compare the words, except those with a digit: numbers, addresses, names of parts."""
    is_shortened = len(part.split()) == 1  # to its name; it may match
    return is_shortened or _plain_words(part) == _plain_words(text[len(PREFIX) :].strip())


def _plain_words(sentence: str) -> list[str]:
    return [word for word in sentence.split()[1:] if not DIGIT.search(word)][:WORDS_ALIKE]


def is_within_rate(actions: Iterable[float], policy: BrokerPolicy, now: float) -> bool:
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
    # Deep checks use the whole machine, and the broker's drain keeps jobs off.
    deep_runs: bool = False
    # Answers so far: the incident count of a check's GPU; the node; the other nodes; the result of a change.
    incidents: Mapping[str, int] = field(default_factory=dict)
    node: decide.BrokerNode | Failed | None = None
    other_nodes: decide.OtherNodes | Failed | None = None
    changed: decide.Act | Failed | None = None
    # What a drain of Slurm's own has left on the node.
    remains: slurm_drains.Remains | None = None


@dataclass(frozen=True, slots=True)
class AskNode:
    pass


@dataclass(frozen=True, slots=True)
class AskOtherNodes:
    pass


@dataclass(frozen=True, slots=True)
class AskRemains:
    pass


@dataclass(frozen=True, slots=True)
class ApplyAct:
    act: decide.Act


Action = Log | Enter | AskNode | AskOtherNodes | AskRemains | ApplyAct
Outcome = tuple[Memory, tuple[Action, ...]]


def step(memory: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    """Take in the verdicts, and change the node at most once. See the module's docstring for the order."""
    after = _take_in_verdicts(memory, inputs, now)
    incidents = _list_new_incidents(memory, after, inputs, now)
    if unanswered := tuple(incident for incident in incidents if incident.check not in inputs.incidents):
        return memory, unanswered
    counted = {
        incident.check: classify(after.seen[incident.check], incident, inputs.incidents[incident.check])
        for incident in incidents
    }
    after = replace(after, seen={**after.seen, **counted})
    if is_due(after.jobs_look, now):
        after = expect_drain(replace(after, jobs_look=0.0), now)
    if not after.due and _differs_from_last_act(after, inputs, now):
        after = replace(after, due=now.steady + _choose_delay(after, inputs, now))
    if is_due(after.due, now):
        return _act(memory, after, inputs, now)
    if is_due(after.recheck, now):
        return _recheck(memory, after, inputs, now)
    return after, ()


def _choose_delay(memory: Memory, inputs: BrokerInputs, now: Now) -> float:
    """Return the delay before a drain.

    A bad commit's check fails on the whole fleet at the same moment. Each node waits for its own share of the spread,
    so that later nodes see earlier drains. The prolog of a single node does not wait for that.
    """
    is_about_to_drain = bool(memory.list_standing(now)) and not memory.drained
    return inputs.policy.guard_spread_s * share(inputs.name) if is_about_to_drain else 0.0


def _take_in_verdicts(memory: Memory, inputs: BrokerInputs, now: Now) -> Memory:
    """Update the state of each check by the verdicts, and drop checks that no longer exist."""
    gpu_count = next((verdict for verdict in inputs.verdicts if verdict.check == "gpu_count"), None)
    verdicts = [verdict for verdict in inputs.verdicts if not is_void(verdict, inputs.scripts)]
    all_gpus_answer = gpu_count is not None and gpu_count.result is Result.OK and bool(inputs.gpus)
    gpus = frozenset(gpu.uuid for gpu in inputs.gpus) if all_gpus_answer else None
    with_jobs, once = (inputs.index.with_jobs, inputs.index.once) if inputs.index else (frozenset(), frozenset())
    seen = decide.observe(memory.seen, verdicts, inputs.policy, now.wall, inputs.boot_id, gpus, with_jobs, once)
    existing = {check: state for check, state in seen.items() if not _is_gone(check, inputs)}
    return replace(memory, seen=existing, held=drop_expired(memory.held, now))


def _list_new_incidents(before: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> list[Enter]:
    """Return an entry of the ledger for each new problem that concerns a GPU."""
    known = decide.select_raised(before.seen)
    evidence = {verdict.check: verdict.evidence for verdict in inputs.verdicts}
    incidents = (
        entry(check, seen, evidence.get(check, ""), inputs.name, inputs.gpus, inputs.policy, now.wall)
        for check, seen in decide.select_raised(after.seen).items()
        if check not in known
    )
    return [incident for incident in incidents if incident is not None]


def _is_gone(check: str, inputs: BrokerInputs) -> bool:
    """Tell if the check is no longer in the tree and has no valid verdict.

    A script without a verdict since the pod began counts as gone: it does not run on a drained node.
    """
    if any(verdict.check == check and not is_void(verdict, inputs.scripts) for verdict in inputs.verdicts):
        return False
    return is_of_script(check) or (inputs.index is not None and check not in inputs.index.checks)


def _find_unreleased_parts(memory: Memory, reason: str, inputs: BrokerInputs, now: Now) -> dict[str, str]:
    """Return the parts of a posted reason that must stay, as check -> part (`decide.find_unreleased`)."""

    def is_dead(check: str) -> bool:
        return check in memory.forgotten or _is_gone(check, inputs)

    return decide.find_unreleased(reason, memory.seen, memory.held, inputs.policy, now.wall, is_dead)


def _differs_from_last_act(memory: Memory, inputs: BrokerInputs, now: Now) -> bool:
    """Tell if the problems differ from those at the last action, or if the posted reason names too many."""
    standing = memory.list_standing(now)
    unreleased = _find_unreleased_parts(memory, memory.posted, inputs, now)
    current_reason = decide.reason(standing, decide.find_left(standing, unreleased))
    names_too_many = not decide.names(memory.posted) <= decide.names(current_reason)
    return collect_names(standing) != memory.acted_on or names_too_many


# Acting. `unchanged` is the memory before this step, which a step returns with a question; `after` is the new one.


def _act(unchanged: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    """Act on the node as slurmctld describes it now."""
    node = inputs.node
    if node is None:
        return unchanged, (AskNode(),)
    if isinstance(node, Failed):
        return _retry_later(after, node.why, now)
    after = replace(after, node_at_start=after.node_at_start or node, node_read_at=now.steady)
    if cause := slurm_drains.find_cause(node):
        return _act_on_slurm_drain(unchanged, after, cause, node, inputs, now)
    after = replace(after, slurm=replace(after.slurm, clean_since=0.0, posted=""), slurm_drain="")
    return _act_on_verdicts(unchanged, after, node, inputs, now)


def _act_on_verdicts(
    unchanged: Memory, after: Memory, node: decide.BrokerNode, inputs: BrokerInputs, now: Now
) -> Outcome:
    """Drain the node for its standing problems, update the reason, or clear a drain of the broker's own."""
    logs: tuple[Log, ...] = ()
    act = _decide(after, node, inputs, now)
    if act.kind in {"drain", "update"}:
        if inputs.other_nodes is None:
            return unchanged, (AskOtherNodes(),)
        if isinstance(inputs.other_nodes, Failed):
            return _retry_later(after, inputs.other_nodes.why, now)
        after, logs = _hold_widespread(after, inputs.other_nodes, inputs.policy, now)
        act = _decide(after, node, inputs, now)
    if act.kind == "nothing":
        own_reason = node.reason if node.drained and node.is_own_drain else ""
        after = _remember_act(replace(after, drained=node.drained, posted=own_reason), act, now)
        if not node.drained and now.steady < after.drain_expected_until:
            after = replace(after, due=now.steady + slurm_drains.AGAIN_S / 2)
        return after, logs
    if act.kind == "clear" and inputs.deep_runs:
        text = "deep checks are running: the drain ends after them"
        return replace(after, status_text=text, drained=True, posted=node.reason, due=now.steady + DEEP_S), logs
    if not is_within_rate(after.changes, inputs.policy, now.steady):
        text = f"too many changes within {inputs.policy.rate_per_s:g} s, waiting ({act.kind}: {act.text})"
        pause = inputs.policy.rate_per_s / inputs.policy.rate_actions
        return replace(after, status_text=text, due=now.steady + pause), logs
    if inputs.changed is None:
        return unchanged, (*logs, Log(f"{act.kind} {inputs.name}: {act.text}"), ApplyAct(act))
    if isinstance(inputs.changed, Failed):
        return _retry_later(after, inputs.changed.why, now)
    after = _record_change(after, inputs.policy, now)
    if act.kind == "clear":
        return _remember_act(replace(after, drained=False, posted="", recheck=0.0), act, now), ()
    recheck = now.steady + inputs.policy.guard_recheck_s
    return _remember_act(replace(after, drained=True, posted=act.text, recheck=recheck), act, now), ()


def _decide(memory: Memory, node: decide.BrokerNode, inputs: BrokerInputs, now: Now) -> decide.Act:
    return decide.decide(memory.list_standing(now), node, _find_unreleased_parts(memory, node.reason, inputs, now))


def _hold_widespread(
    memory: Memory, other_nodes: decide.OtherNodes, policy: BrokerPolicy, now: Now
) -> tuple[Memory, tuple[Log, ...]]:
    """Hold the problems that too many other nodes have: this node is not drained for them."""
    standing = memory.list_standing(now)
    widespread = find_widespread(standing, other_nodes.nodes, other_nodes.total, policy, now.wall)
    logs = tuple(
        Log(f"{standing[check].name(check)} has failed on too many nodes: this node is not drained for it"
            f" ({standing[check].reason})") for check in sorted(widespread)
    )  # fmt: skip
    return hold(memory, widespread, now.wall + policy.guard_lasts_s), logs


def _act_on_slurm_drain(
    unchanged: Memory,
    after: Memory,
    cause: slurm_drains.SlurmDrainCause,
    node: decide.BrokerNode,
    inputs: BrokerInputs,
    now: Now,
) -> Outcome:
    """Lift Slurm's own drain from a clean node, tell what hangs, or put back the reason that it replaced."""
    if inputs.remains is None:
        return unchanged, (AskRemains(),)
    standing = after.list_standing(now)
    clean_since = 0.0 if inputs.remains.text else after.slurm.clean_since or now.steady
    watch = replace(after.slurm, clean_since=clean_since)
    act = slurm_drains.judge(cause, node, inputs.remains, watch, now.steady, inputs.name)
    if standing and act.kind == "clear":
        act = decide.Act("nothing", f"{node.reason}: stays while the node fails {', '.join(standing)}")
    after = replace(after, slurm=watch, slurm_drain=f"Slurm drained the node: {act.text}", drained=True, posted="")
    after = replace(_remember_act(after, act, now), due=now.steady + slurm_drains.AGAIN_S)
    if act.kind == "nothing" or not is_within_rate(after.changes, inputs.policy, now.steady):
        return after, ()
    if inputs.changed is None:
        return unchanged, (Log(f"{act.kind} {inputs.name}: {act.text}"), ApplyAct(act))
    if isinstance(inputs.changed, Failed):
        return _retry_later(after, inputs.changed.why, now)
    after = _record_change(after, inputs.policy, now)
    if act.kind == "update":
        return replace(after, slurm=replace(watch, posted=act.text)), ()
    lifts = tuple(at for at in watch.lifts if now.steady - at < slurm_drains.WITHIN_S)
    if not cause.kill or slurm_drains.counts_as_relapse(watch):
        lifts = (*lifts, now.steady)
    return replace(after, slurm=slurm_drains.SlurmDrainWatch(lifts=lifts), slurm_drain="", drained=False, due=0.0), ()


def _record_change(memory: Memory, policy: BrokerPolicy, now: Now) -> Memory:
    """Count a change of the node for the rate limit."""
    recent = (at for at in memory.changes if at > now.steady - policy.rate_per_s)
    return replace(memory, changes=(*recent, now.steady))


def _remember_act(memory: Memory, act: decide.Act, now: Now) -> Memory:
    """Remember the decision and the problems behind it: nothing is due until they change."""
    text, problems = f"{act.kind}: {act.text}", collect_names(memory.list_standing(now))
    return replace(memory, status_text=text, acted_on=problems, due=0.0, failures=0, forgotten=frozenset())


def _retry_later(memory: Memory, reason: str, now: Now) -> Outcome:
    """Retry after a growing pause, because slurmctld did not answer or refused."""
    pause = RETRY_S[min(memory.failures, len(RETRY_S) - 1)]
    later = replace(memory, status_text=reason, due=now.steady + pause, failures=memory.failures + 1)
    return later, (Log(f"{reason}: retrying in {pause:.0f} s"),)


def _recheck(unchanged: Memory, after: Memory, inputs: BrokerInputs, now: Now) -> Outcome:
    """Look once after a drain if many other nodes reported the same problem at the same moment."""
    if inputs.other_nodes is None:
        return unchanged, (AskOtherNodes(),)
    after = replace(after, recheck=0.0)
    if isinstance(inputs.other_nodes, Failed):
        return after, (Log(f"{inputs.other_nodes.why}: the drain stays"),)
    widespread = find_widespread(
        after.list_standing(now), inputs.other_nodes.nodes, inputs.other_nodes.total, inputs.policy, now.wall
    )
    if not widespread:
        return after, ()
    after = hold(after, widespread, now.wall + inputs.policy.guard_lasts_s)
    text = f"{', '.join(sorted(widespread))} failed on too many nodes: the drain is withdrawn"
    return replace(after, due=now.steady), (Log(text),)


def collect_names(standing: Mapping[str, decide.Seen]) -> frozenset[str]:
    return frozenset(seen.name(check) for check, seen in standing.items())
