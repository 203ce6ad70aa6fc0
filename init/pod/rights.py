"""Run work with another user's rights alone, in a child that this user cannot signal."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run_as(user: int, group: int, work: Callable[[], object], *, unused: int, within: int = 0) -> None:
    """Run it as the user and group, and wait; the child is killed after `within` seconds, 0 for never.

    For a signal the kernel compares the sender with the target's real user: that is `unused`, a reserved id as which no
    process runs. It is not root, whose processes a `kill(-1)` would reach.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(within)
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(unused, user, unused)
            if os.getresuid() == (unused, user, unused):
                work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
