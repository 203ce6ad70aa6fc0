"""The one place where a mistake of ours in deciding ends: it is told, and nothing is done. Whoever would end by it is
started again, meets the same world and ends again, and says nothing to anybody in between."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import PurePath

from fleet.decide.actions import Notice
from fleet.decide.decide import Decision, told
from fleet.decide.decide import decide as whole
from fleet.decide.memory import Memory
from fleet.policy import Policy
from fleet.world.snapshot import Snapshot
from ground.errors import one_line

MISTAKE = "mistake"
FRAMES, LONGEST = 8, 512
# What it fell over may be gone with the next world; where it is not, a log and a processor are spared.
FIRST_S, LONGEST_S = 1.0, 30.0


def decide(world: Snapshot, memory: Memory, now: float, policy: Policy) -> Decision:
    """What `whole` says, or why it says nothing: `mistake` is for a log. Nothing but what was told is remembered, for
    it may have fallen over what it remembers; all of that may be lost at any moment."""
    try:
        return whole(world, memory, now, policy)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__, -FRAMES)
        said = one_line(f"{type(error).__name__}: {error}")[:LONGEST]
        last = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
        text = f"nothing is decided: {said} ({last}): a mistake of the fleet's, and its log has more; it is tried again"
        trace = "".join(traceback.format_list(frames)) + said
        return told(memory, [Notice("fleet", MISTAKE, text)], (), Memory(), now, mistake=trace)


def why(decision: Decision) -> str:
    """Why nothing is decided, or nothing."""
    return next((one.text for one in decision.stands if one.kind == MISTAKE), "") if decision.mistake else ""


@dataclass(slots=True)
class Backoff:
    """Between one mistake and the next attempt, longer each time."""

    times: int = 0
    until: float = 0.0
    why: str = ""

    def saw(self, decision: Decision, now: float) -> None:
        self.why = why(decision)
        if not self.why:
            self.times, self.until = 0, 0.0
            return
        self.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(self.times, 10))
        self.times += 1

    def waits(self, now: float) -> bool:
        return now < self.until
