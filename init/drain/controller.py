"""Drain of a controller: hand over to a healthy standby. A controller alone, or one that stands by, has nothing to do.

It never fails: a controller that cannot hand over saves its state and releases its term when its services stop.
"""

from __future__ import annotations

import os

from init.drain.deadline import Deadline, report
from init.errors import InitError
from init.pod.pod import Pod
from init.slurm.place import held, several


def drain(_: str, deadline: Deadline) -> None:
    pod = Pod(os.environ)
    if not (several(pod) and held(pod)):
        report("nothing to hand over")
        return
    from init.state.hand_over import hand_over

    try:
        report(str(hand_over(pod, report=report, within=deadline.left)))
    except InitError as error:
        report(str(error))


def resume(_: str) -> None:
    report("this controller may act")
