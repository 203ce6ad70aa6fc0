"""A cause in words, by who reads them. Pure.

A daemon's last line can hold anything, a password too. The control socket is root's and shows it; HTTP is everybody's,
and a pod's status is read by more people than its log: there the cause stands in init's own words alone. Programs of
init's own speak in such words: their last line is the reason that they give. And where a line ends with the system's
name of an error, as daemons write it, that name is nobody's secret.

A cause keeps apart what is init's and what is quoted (`init.engine.states.Cause`): nothing here looks for a quotation
in a sentence.
"""

from __future__ import annotations

import errno
import os

from init.plan.builtin import is_builtin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.states import Cause

# Modules whose last line is a sentence of ours, whatever went wrong.
_OURS = ("init.", "health.broker", "health.checks.mounts")


def is_ours(command: tuple[str, ...]) -> bool:
    """Whether it is a step or a program of init, whose output is made of its own sentences."""
    return is_builtin(command) or ("-m" in command[:-1] and command[command.index("-m") + 1].startswith(_OURS))


def cause_text(cause: Cause | None, *, quoting: bool) -> str:
    """To root with what the service said; to everybody without, unless it is a program of ours."""
    if cause is None:
        return ""
    return str(cause) if quoting or is_ours(cause.speaker) else cause.text(_system_error(cause.quoted))


def _system_error(line: str) -> str:
    """` (No space left on device)`, where that is how the line ends: one of the system's names, or nothing."""
    line = line.rstrip(" .)")
    return max((f" ({name})" for name in map(os.strerror, errno.errorcode) if line.endswith(name)), key=len, default="")
