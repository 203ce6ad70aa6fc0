"""`python3 -I -m init.drain ROLE [--resume]`: a role's work before its pod stops, run by PID 1 as a child.

It may run twice (preStop calls `minivm drain`, then TERM comes) and may be cut at any moment: every step looks first
and does the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from init.drain.deadline import Deadline, allowed_by_pid_1, budget
from init.errors import InitError
from init.slurm import client

USAGE = "usage: python3 -I -m init.drain worker|login|controller [--resume]"


def main(arguments: Sequence[str]) -> int:
    roles = {"worker": "init.drain.worker", "login": "init.drain.login", "controller": "init.drain.controller"}
    if not arguments or arguments[0] not in roles or arguments[1:] not in ([], ["--resume"]):
        print(USAGE, file=sys.stderr)
        return 2
    import importlib

    module = importlib.import_module(roles[arguments[0]])
    deadline = Deadline(budget(os.environ, allowed_by_pid_1))
    controller = client.address(os.environ)
    try:
        if arguments[1:]:
            module.resume(controller)
        else:
            module.drain(controller, deadline)
    except InitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
