"""What a service said itself, and where that may be repeated. Pure.

A daemon's last line can hold anything, a password too. The control socket is root's and shows it; HTTP is everybody's,
and a pod's condition is read by more people than its log: there the cause stands in init's own words alone. Programs of
init's own speak in such words: their last line is the reason that they give. And where a line ends with the system's
name of an error, as daemons write it, that name is nobody's secret.
"""

from __future__ import annotations

import errno
import os

from init.builtin import is_builtin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.service import Service

DETAIL = "\t"  # in what a probe says: how long goes before it
# Modules whose last line is a sentence of ours, whatever went wrong.
_OURS = ("init.", "gitsync.mounts_answer")
# What `init.machine` adds behind a line that it quotes.
_VERDICTS = ("; gave up after ", "; no retry can mend exit code ")


def public(why: str, spec: Service) -> str:
    """Why a service failed, for everybody."""
    return why if all(is_ours(command) for command in _speakers(why, spec)) else unquoted(why)


def is_ours(command: tuple[str, ...]) -> bool:
    """Whether it is a step or a program of init, whose output is made of its own sentences."""
    return is_builtin(command) or ("-m" in command[:-1] and command[command.index("-m") + 1].startswith(_OURS))


def unquoted(why: str) -> str:
    """Without the line that an end quotes (`exited 3: LINE`), nor the output that a probe adds."""
    head, colon, rest = why.partition(": ")
    words = head.split()
    if colon and (words[-2:-1] == ["exited"] or words[-3:-1] == ["killed", "by"] or words[-1:] == ["status"]):
        verdict = max(rest.rfind(mark) for mark in _VERDICTS)
        line, judged = (rest[:verdict], rest[verdict:]) if verdict >= 0 else (rest, "")
        return head + _system_error(line) + judged
    return why.partition(DETAIL)[0]


def _system_error(line: str) -> str:
    """` (No space left on device)`, where that is how the line ends."""
    line = line.rstrip(" .)")
    return max((f" ({name})" for name in map(os.strerror, errno.errorcode) if line.endswith(name)), key=len, default="")


def _speakers(why: str, spec: Service) -> list[tuple[str, ...]]:
    """Whose line it may be: that of a preparation that failed, or the service's."""
    return [step for step in spec.prepare if why.startswith(f"{step[0]} (prepare) ")] or [spec.command]
