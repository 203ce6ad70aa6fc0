"""A cause as text, depending on the reader. Pure.

A daemon's last line can contain anything, a password too. Root reads it through the control socket. Everybody reads
HTTP, and more people read a pod's status than its log, so there the cause has init's own words alone. The last line of
init's own programs is such a text: the reason that they give. A system error's name at the end of a line, as daemons
write it, is no secret either.

A cause separates init's words from the quotation (`init.engine.states.Cause`): nothing here searches a sentence for
one.
"""

from __future__ import annotations

import errno
import os

from init.plan.builtin import is_builtin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.states import Cause

# Modules whose last line is always our own sentence.
_OWN_MODULES = ("init.", "health.broker", "health.checks.mounts")


def is_ours(command: tuple[str, ...]) -> bool:
    """Tell if it is a step or program of init, whose output consists of its own sentences."""
    return is_builtin(command) or ("-m" in command[:-1] and command[command.index("-m") + 1].startswith(_OWN_MODULES))


def cause_text(cause: Cause | None, *, quoting: bool) -> str:
    """Format a cause: with the quotation for root, without it for everybody unless our own program wrote it."""
    if cause is None:
        return ""
    return str(cause) if quoting or is_ours(cause.speaker) else cause.text(_system_error(cause.quoted))


def _system_error(line: str) -> str:
    """Return ` (No space left on device)` if the line ends with a system error's name, else ""."""
    line = line.rstrip(" .)")
    return max((f" ({name})" for name in map(os.strerror, errno.errorcode) if line.endswith(name)), key=len, default="")
