"""Places where a cycle can be cut, for tests alone: MINIVM_GITSYNC_FAULT=STEP:ACTION.

ACTION is `kill` (SIGKILL to oneself: what the out-of-memory killer and a node's power switch do), `full` (no space
left on device), `error`, or `stop` (SIGSTOP: the test looks at the disk, then continues or kills). In production the
variable is unset and a place costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

# Every place, in the order in which a cycle passes them. A test walks this list.
STEPS = (
    "locked", "healed", "fetched", "resolved", "candidate-saved", "verified", "tree-begun", "tree-half",
    "tree-written", "checked", "tree-synced", "tree-named", "link-made", "link-swapped", "published-saved",
    "tree-unnamed", "lease-removed", "pruned", "saved",
)  # fmt: skip

# Set by a test that runs cycles in its own forked children.
hook: Callable[[str], None] | None = None


def at(step: str) -> None:
    if hook is not None:
        hook(step)
    wanted = os.environ.get("MINIVM_GITSYNC_FAULT", "")
    if wanted and wanted.partition(":")[0] == step:
        act(wanted.partition(":")[2])


def act(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            raise OSError(errno.EIO, f"fault {action!r}")
