"""The broker's memory, and the changes that a person may make to it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from health.broker.decide import BrokerNode, Seen, raised
from health.broker.slurm_drains import EXPECTED_S, SOON_S, SlurmDrainWatch

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
    # Of Slurm's own drains, and what the pod tells of the one that stands; until when such a drain is expected.
    slurm: SlurmDrainWatch = field(default_factory=SlurmDrainWatch)
    slurm_drain: str = ""
    expected: float = 0.0
    # When slurmctld last told of the node.
    looked: float = 0.0

    def standing(self, now: Now) -> dict[str, Seen]:
        """Return the raised problems that are not held."""
        released = unexpired(self.held, now)
        return {check: seen for check, seen in raised(self.seen).items() if seen.key(check) not in released}


@dataclass(frozen=True, slots=True)
class Log:
    text: str


def resumed(memory: Memory, now: Now) -> tuple[Memory, tuple[Log, ...]]:
    """Hold the problems of a node that we drained and that is no longer drained: a person resumed it on purpose."""
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
    """Slurm is about to drain the node, or may be: look soon, and again until it has."""
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
