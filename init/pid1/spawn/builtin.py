"""Built-in commands: short steps of our own that PID 1 runs in a fork of itself, without an exec.

An interpreter of its own for each of them was most of a worker's boot. What a fork shares, and what it must not, is in
docs/decisions/a-step-is-a-fork.md. Everything that runs long, or as somebody else, is a program and has its exec.
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
    """In the child: as good as a Python of its own, and the exit code that it would have had."""
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
    """In a child without exec: give up what an exec would have taken, and be told apart in `ps`."""
    gc.disable()  # objects of PID 1 must not be destroyed here: the numbers of their descriptors are closed, or others'
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208 - no pathlib on PID 1's path
    os.closerange(3, highest + 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python itself begins: a write fails, and says so
        signal.signal(number, signal.SIG_IGN)
    try:
        with open("/proc/self/comm", "w") as stream:  # noqa: PTH123 - as above; prctl would need ctypes
            stream.write(f"minivm-{name}"[:15])
    except OSError:
        return  # a name is no reason to fail
