"""Kill a fleet before one of its changes, from outside: patch the method that makes a change.

`python -m tests.process.fleet_faults NUMBER` runs the fleet with the settings of its environment; 0: without a kill.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from fleet.cli import main
from fleet.decide.actions import Change
from fleet.reconciler import Reconciler


def kill_before(number: int) -> None:
    """Kill this process before that change, counted from 1. Changes run one at a time, so none is under way then."""
    perform, turn, begun = Reconciler.perform, asyncio.Lock(), 0

    async def counted(self: Reconciler, change: Change, *, fast: bool = False) -> bool:
        nonlocal begun
        async with turn:
            begun += 1
            if begun == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return await perform(self, change, fast=fast)

    Reconciler.perform = counted  # type: ignore[method-assign]  # the point of it


if __name__ == "__main__":
    if int(sys.argv[1]):
        kill_before(int(sys.argv[1]))
    main(["run"])
