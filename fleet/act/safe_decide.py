"""Run the decision, and turn a bug in it into a notice and no changes.

Otherwise the fleet would crash on the same snapshot after each restart and report nothing.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import PurePath

from fleet.decide.actions import Notice
from fleet.decide.decide import Decision, finish
from fleet.decide.decide import decide as unguarded
from fleet.decide.memory import FleetMemory
from fleet.policy import Policy
from fleet.world.snapshot import FleetSnapshot
from ground.errors import one_line

MISTAKE = "mistake"
FRAMES, LONGEST = 8, 512
# Pauses between attempts with a bug: the next snapshot may not trigger it.
FIRST_S, LONGEST_S = 1.0, 30.0


def decide(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    """Decide; after a bug return a decision that holds only a notice, and in `mistake` the traceback for the log.

    Drop the memory except for reported notices: it may trigger the bug, and losing it is always safe.
    """
    try:
        return unguarded(snapshot, memory, now, policy)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__, -FRAMES)
        what = one_line(f"{type(error).__name__}: {error}")[:LONGEST]
        last = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
        text = f"nothing is decided: {what} ({last}): a mistake of the fleet's, and its log has more; it is tried again"
        trace = "".join(traceback.format_list(frames)) + what
        return finish(memory, [Notice("fleet", MISTAKE, text)], (), FleetMemory(), now, mistake=trace)


def mistake_text(decision: Decision) -> str:
    """Return the text of the bug's notice; empty: no bug."""
    return next((notice.text for notice in decision.notices if notice.kind == MISTAKE), "") if decision.mistake else ""


@dataclass(slots=True)
class Backoff:
    """The pause after a bug, longer each time."""

    times: int = 0
    until: float = 0.0
    why: str = ""

    def update(self, decision: Decision, now: float) -> None:
        self.why = mistake_text(decision)
        if not self.why:
            self.times, self.until = 0, 0.0
            return
        self.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(self.times, 10))
        self.times += 1

    def waits(self, now: float) -> bool:
        return now < self.until
