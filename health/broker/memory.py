"""What the broker remembers, and what a person may change of that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from health.broker.decide import Node, Seen, raised

# A person's resume is honoured for a day; a problem that is still there then is told again.
RESUMED_LASTS_S = 86400.0


@dataclass(frozen=True, slots=True)
class Now:
    # Of verdicts and of what is held back: others speak of it too.
    wall: float
    # Of all that is due, and never 0, which is no moment: a node whose clock is set drains in time.
    steady: float


@dataclass(frozen=True, slots=True)
class Memory:
    seen: Mapping[str, Seen] = field(default_factory=dict)
    # check@commit -> until when it drains nothing: too many nodes say the same, or a person has resumed the node.
    held: Mapping[str, float] = field(default_factory=dict)
    # Checks that a person has told us to forget until they speak again.
    forgotten: frozenset[str] = frozenset()
    # When the node was changed, by the steady clock.
    changes: tuple[float, ...] = ()
    # What stood when we last acted: while it stands, nobody is asked anything.
    acted_on: frozenset[str] | None = None
    drained: bool = False
    # The node's reason when we last saw it, where it is ours.
    posted: str = ""
    said: str = "starting"
    # The node as this pod found it; None: nobody could say yet.
    found: Node | None = None
    # When to act, and when to ask once more what the fleet says, by the steady clock; 0: at no time.
    due: float = 0.0
    recheck: float = 0.0
    failures: int = 0

    def standing(self, now: Now) -> dict[str, Seen]:
        """What stands against the node, and is not held back."""
        held = unexpired(self.held, now)
        return {check: seen for check, seen in raised(self.seen).items() if seen.key(check) not in held}


@dataclass(frozen=True, slots=True)
class Log:
    text: str


def resumed(memory: Memory, now: Now) -> tuple[Memory, tuple[Log, ...]]:
    """A job starts on a node that we drained, and it is not drained: a person has resumed it, and knows why."""
    said = "a person has resumed the node: what stood against it then drains it no more"
    after = hold(memory, memory.standing(now), now.wall + RESUMED_LASTS_S)
    return replace(after, drained=False, posted="", said=said), (Log(said),)


def forget(memory: Memory, named: Iterable[str]) -> tuple[Memory, tuple[Log, ...]]:
    """A person has dealt with it: what these checks have said counts no more. What they say from now on does."""
    checks = frozenset(named)
    return replace(
        memory,
        seen={check: seen for check, seen in memory.seen.items() if check not in checks},
        held={key: until for key, until in memory.held.items() if key.split("@")[0] not in checks},
        forgotten=memory.forgotten | checks,
        acted_on=None,
    ), tuple(Log(f"{check} is forgotten, a person says") for check in sorted(checks))


def what_of(memory: Memory, check: str, now: Now) -> str:
    """A check's state, for a prolog's record and for people."""
    seen = memory.seen.get(check, Seen())
    if check in memory.standing(now):
        return "drained" if memory.drained else "about to drain"
    if seen.key(check) in unexpired(memory.held, now):
        return "held back: too many nodes say the same, or a person has resumed the node"
    return "seen, not long enough" if seen.problems else "not seen"


def is_restless(memory: Memory) -> bool:
    """Whether time alone may change something: without that, a look waits for another verdict."""
    waiting = any(seen.oks for seen in memory.seen.values() if seen.raised)
    return waiting or bool(memory.posted) or bool(memory.due or memory.recheck)


def is_over(moment: float, now: Now) -> bool:
    return bool(moment) and now.steady >= moment


def unexpired(held: Mapping[str, float], now: Now) -> dict[str, float]:
    return {name: until for name, until in held.items() if until > now.wall}


def hold(memory: Memory, checks: Iterable[str], until: float) -> Memory:
    return replace(memory, held={**memory.held, **{memory.seen[check].key(check): until for check in checks}})
