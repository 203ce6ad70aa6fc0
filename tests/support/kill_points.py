"""Kill a piece of work before any of its changes, as a kernel or a kubelet does, without a word of the work's own code.

Python reports each change of the file system as an audit event before it happens. `killed_before` runs the work in a
forked process, counts these events there, and ends that process at the chosen one: no `finally` and no handler runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

CHANGES = frozenset((
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "subprocess.Popen",
))  # fmt: skip
KILLED = 113


def killed_before(number: int, work: Callable[[], object]) -> bool:
    """Run the work, but kill it before change `number`, counted from 0; return False if it ended before that."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kill_at_change(number)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the work failed with {code}; its error is in the captured output"
    return code == KILLED


def kill_at_change(number: int) -> None:
    """End this process before its change of that number. A hook lasts as long as the process."""
    left = [number]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            if left[0] == 0:
                os._exit(KILLED)
            left[0] -= 1

    sys.addaudithook(count)
