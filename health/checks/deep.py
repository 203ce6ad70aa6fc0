"""Whether this pod begins a deep check by itself, and that it does so once in a boot.

Its node's drain says so: the fleet waits for a machine that was rebooted, or an earlier pod has found what a reboot or
the manufacturer must mend. Both hold before the pod begins and are looked at once more when the checks do, so no job is
there, and none comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from health import deep
from health.ask import ask_broker
from health.deep import State, Word
from health.places import Places, boot_id

# It asks the controller, which may take its time.
BROKER_S = 15.0
CUT = "they were cut, and jobs may run by now"


def asked() -> bool | None:
    """None: the broker has not heard from the controller yet."""
    if os.environ.get("MINIVM_HEALTH_DEEP") == "1":
        return True
    said = (ask_broker({"ask": "deep"}, BROKER_S) or {}).get("deep")
    return said if isinstance(said, bool) else None


def once(run: Callable[[], str], wanted: Callable[[], bool | None] = asked) -> bool:
    """Whether that is settled for this boot. One that was cut begins anew, where it still may; `run` says why it could
    not run."""
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
    why = run()
    after = deep.read(path)
    if after is None or not after.settled(boot):
        deep.write(path, Word(boot, State.UNKNOWN, said=(why or "the round said nothing")[: deep.SAID]))
    return True
