"""The decision, guarded: a bug in it is reported and nothing is done.

Otherwise the fleet would restart, meet the same snapshot, fail again, and report nothing in between.
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
# The next snapshot may be without the cause; if it is not, the pauses spare log and processor.
FIRST_S, LONGEST_S = 1.0, 30.0


def decide(snapshot: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    """Decide; after a bug return a decision that holds only a notice, and in `mistake` the traceback for the log.

    The memory is dropped except for reported notices, since it may be the cause, and may be lost at any time.
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
    """Why nothing is decided; empty: it is."""
    return next((each.text for each in decision.stands if each.kind == MISTAKE), "") if decision.mistake else ""


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
