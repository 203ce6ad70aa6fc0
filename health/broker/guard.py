"""What bounds the broker: whether too many nodes say the same, and how often it may act. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from health.broker.decide import PREFIX, Other, Seen, parts, reason
from health.policy import BrokerPolicy

# Reasons are cut; so many words of two are compared.
WORDS_ALIKE = 8
DIGIT = re.compile("[0-9]")


def guarded(
    standing: Mapping[str, Seen], others: Iterable[Other], total: int, policy: BrokerPolicy, now: float
) -> frozenset[str]:
    """Of the standing checks, those that too many other nodes are drained for by what seems to be one cause.

    A commit with a bad check makes every node look sick: it has never passed here, all say so within the hour, in the
    same words. Hardware that breaks now here and now there does none of that, however often. A node counts where two of
    the three agree, on the same commit.
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
    """The same words, but for what has a digit in it: numbers, addresses, names of parts."""
    words = [
        [word for word in said.split()[1:] if not DIGIT.search(word)][:WORDS_ALIKE]
        for said in (part, text[len(PREFIX) :].strip())
    ]
    # Of a part that was shortened to its name nothing is known.
    return words[0] == words[1] or len(part.split()) == 1


def within_rate(actions: Iterable[float], policy: BrokerPolicy, now: float) -> bool:
    return sum(1 for at in actions if at > now - policy.rate_per_s) < policy.rate_actions
