"""Limits of the broker: problems common to too many nodes, and the rate of actions. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from health.broker.decide import PREFIX, Other, Seen, parts, reason
from health.policy import BrokerPolicy

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
