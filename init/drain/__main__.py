"""`python3 -I -m init.drain ROLE [--resume]`: a role's work before its pod stops, run by PID 1 as a child.

It may run twice (preStop calls `minivm drain`, then TERM comes) and may be cut at any moment: every step looks first
and does the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from init.drain.deadline import Deadline, budget, compute_budget_of_pid_1, report
from init.errors import InitError
from init.slurm import client

USAGE = "usage: python3 -I -m init.drain worker|login|controller [--resume]"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] not in (["worker"], ["login"], ["controller"]) or arguments[1:] not in ([], ["--resume"]):
        print(USAGE, file=sys.stderr)
        return 2
    role, is_resume = arguments[0], len(arguments) > 1
    if os.getpgrp() == os.getpid():  # as PID 1 starts it
        signal.signal(signal.SIGTERM, _end)
    deadline = Deadline(budget(os.environ, compute_budget_of_pid_1))
    try:
        if role == "controller":
            report("this controller may act") if is_resume else drain_controller(deadline)
            return 0
        import importlib

        module = importlib.import_module(f"init.drain.{role}")
        if is_resume:
            module.resume(client.address(os.environ))
        else:
            module.drain(client.address(os.environ), deadline)
    except InitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _end(number: int, _: object) -> None:
    """End with all clients of Slurm: PID 1 resumes the node next, and a late request would drain it again."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
    os._exit(128 + number)


def drain_controller(deadline: Deadline) -> None:
    """Hand over to a healthy standby. A single or a standby controller has nothing to do.

    It never fails: a controller that cannot hand over saves its state and releases its term when its services stop.
    """
    from init.pod.pod import Pod
    from init.slurm.place import read_term, several

    pod = Pod(os.environ)
    if not (several(pod) and read_term(pod)):
        report("nothing to hand over")
        return
    from init.state.hand_over import hand_over

    try:
        report(str(hand_over(pod, report=report, within=deadline.left)))
    except InitError as error:
        report(str(error))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
