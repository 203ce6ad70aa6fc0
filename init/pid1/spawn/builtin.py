"""Built-in commands: short steps of our own that PID 1 runs in a fork of itself, without an exec.

A new interpreter for each was most of a worker's boot. docs/decisions/a-step-is-a-fork.md says what a fork shares and
what it must not. Everything that runs long, or as another user, is a program with an exec.
"""

from __future__ import annotations

import gc
import os
import sys

from init.lean import signal
from init.plan.builtin import MARK, MODULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command in the child as its own Python would, and return the exit code."""
    name, arguments = command[0].removeprefix(MARK), command[1:]
    os.environ.clear()
    os.environ.update(env)
    try:
        from importlib import import_module

        main = import_module(MODULES[name]).main
        code = main(arguments) if arguments else main()
        sys.stdout.flush()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception:
        import traceback

        traceback.print_exc()
        return 1
    return int(code)


def leave_pid_1(name: str) -> None:
    """Drop, in a child without exec, what an exec would drop; get a name of its own in `ps`."""
    # no destructor of PID 1's objects may run here: it would close descriptors that have another owner now
    gc.disable()
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208 - no pathlib on PID 1's path
    os.closerange(3, highest + 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # like Python's own start: a write fails with an error
        signal.signal(number, signal.SIG_IGN)
    try:
        with open("/proc/self/comm", "w") as stream:  # noqa: PTH123 - as above; prctl would need ctypes
            stream.write(f"minivm-{name}"[:15])
    except OSError:
        return  # a name is optional
