"""Decide if this pod starts the deep checks by itself, and run them once per boot.

The node's drain decides: the fleet waits for a rebooted machine, or an earlier pod found a problem that needs a reboot
or the manufacturer. The drain precedes the pod and is checked again when the checks start, so no job runs and none
comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from health import deep
from health.ask import ask_broker
from health.deep import State, Word
from health.places import Places, boot_id

# The broker asks the controller, which may take time.
BROKER_S = 15.0
CUT = "the deep checks were interrupted, and jobs may run by now"


def asked() -> bool | None:
    """Ask the broker if deep checks are wanted; None while it has no answer from the controller."""
    if os.environ.get("MINIVM_HEALTH_DEEP") == "1":
        return True
    answer = (ask_broker({"ask": "deep"}, BROKER_S) or {}).get("deep")
    return answer if isinstance(answer, bool) else None


def once(run: Callable[[], str], wanted: Callable[[], bool | None] = asked) -> bool:
    """Run the deep checks if wanted; tell if they are settled for this boot.

    An interrupted run starts anew if it still may. `run` returns the reason why it could not run.
    """
    path, boot = Places.from_environment().deep, boot_id()
    known = deep.read(path)
    if known is not None and known.settled(boot):
        return True
    if (answer := wanted()) is None:
        return False
    if not answer:
        cut = known is not None and known.boot_id == boot
        deep.write(path, Word(boot, State.UNKNOWN, said=CUT) if cut else Word(boot, State.NOT_ASKED))
        return True
    deep.write(path, Word(boot, State.RUNNING))
    failure = run()
    after = deep.read(path)
    if after is None or not after.settled(boot):
        deep.write(path, Word(boot, State.UNKNOWN, said=(failure or "the round left no result")[: deep.TEXT_LIMIT]))
    return True
