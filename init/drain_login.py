"""A login pod before it stops: nobody new, a word to those who are there, and their sessions' grace.

Who is there is read from the names of processes, and any user gives his own processes any name. So a session is what
root's sshd has as a child, and a word goes to nothing but a terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from init.drain import Deadline, say

NOLOGIN = Path("/run/nologin")
MESSAGE = "This login pod is about to stop. Jobs are not affected. Log in again for a new pod.\n"
LOOK_EVERY = 0.5
PROC = Path("/proc")
DEV = Path("/dev")
PROGRAMS = ("/usr/sbin/sshd", "/usr/lib/openssh/sshd-session")
# `sshd-session: NAME@pts/3,pts/4`; a session without a terminal (scp, an editor) has `@notty`. `[priv]` is its monitor.
_TITLE = re.compile(rb"sshd(?:-session)?: .+@([^@\s]+)")
_TERMINAL = re.compile(r"pts/[0-9]+")


def drain(controller: str, deadline: Deadline) -> None:
    NOLOGIN.write_text(MESSAGE)
    sessions = find_sessions()
    if not sessions:
        say("no sessions")
        return
    told = tell(terminals(sessions), deadline.left)
    say(f"told {told} terminals of {len(sessions)} sessions")
    # The end of the budget is the end of the wait; sshd's own stop then hangs up on those who stayed.
    while (sessions := find_sessions()) and deadline.left > 1.0:
        deadline.pause(min(LOOK_EVERY, deadline.left - 1.0))
    say(f"{len(sessions)} sessions are left" if sessions else "all sessions have ended")


def resume(controller: str) -> None:
    NOLOGIN.unlink(missing_ok=True)
    say("logins are open")


def find_sessions(proc: Path = PROC) -> dict[int, str]:
    """The sshd processes that serve one user each, and what their titles say of terminals."""
    found = {}
    for directory in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            title = _TITLE.fullmatch((directory / "cmdline").read_bytes().partition(b"\0")[0].rstrip())
            if title and (_is_sshd(directory) or _is_sshd(proc / _status(directory)["PPid"])):
                found[int(directory.name)] = title[1].decode(errors="replace")
    return found


def _is_sshd(directory: Path) -> bool:
    """Root's own sshd. The process of a session is its user's, and what that one runs may not be looked at without
    SYS_PTRACE: its parent is root's, and nobody else becomes a child of that."""
    if set(_status(directory)["Uid"].split()) != {"0"}:
        return False
    try:
        return str((directory / "exe").readlink()) in PROGRAMS
    except PermissionError:
        return True  # one that has been another user for a moment hides its program, from root without SYS_PTRACE too


def _status(directory: Path) -> Mapping[str, str]:
    lines = (directory / "status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def terminals(sessions: Mapping[int, str], dev: Path = DEV) -> list[Path]:
    return [dev / name for names in sessions.values() for name in names.split(",") if _TERMINAL.fullmatch(name)]


def tell(paths: Iterable[Path], seconds: float) -> int:
    """Like wall, without the need for a utmp that containers do not keep. A stopped terminal must not stop us."""
    text = f"\r\n*** minivm: this pod stops in {seconds:.0f} s. Save your work and log out. ***\r\n".encode()
    told = 0
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.isatty(descriptor):
                    os.write(descriptor, text)
                    told += 1
            finally:
                os.close(descriptor)
    return told
