"""Whether this pod begins a deep check by itself, and that it does so once in a boot.

Its node's drain says so: the fleet waits for a machine that was rebooted, or an earlier pod has found what a reboot or
the manufacturer must mend. Both hold before the pod begins, so no job is there, and none comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from health import deep
from health.ask import ask_broker
from health.deep import State, Word
from health.places import Places, boot_id


def asked() -> bool | None:
    """None: the broker has not heard from the controller yet."""
    if os.environ.get("MINIVM_HEALTH_DEEP") == "1":
        return True
    said = (ask_broker({"ask": "status"}, 1.0) or {}).get("deep")
    return said if isinstance(said, bool) else None


def once(run: Callable[[], str], wanted: Callable[[], bool | None] = asked) -> bool:
    """Whether that is settled for this boot. One that was cut begins anew; `run` says why it could not run."""
    path, boot = Places.from_environment().deep, boot_id()
    known = deep.read(path)
    if known is not None and known.settled(boot):
        return True
    if known is None or known.boot_id != boot:
        if (answer := wanted()) is None:
            return False
        deep.write(path, Word(boot, State.RUNNING if answer else State.NOT_ASKED))
        if not answer:
            return True
    why = run()
    after = deep.read(path)
    if after is None or not after.settled(boot):
        deep.write(path, Word(boot, State.UNKNOWN, said=(why or "the round said nothing")[: deep.SAID]))
    return True
