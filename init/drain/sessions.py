"""Sessions on a login pod, and words on their terminals.

Process names are no proof, since any user can choose them: a session is a child of root's sshd, and words go to
terminals only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from init.drain.deadline import PROC, status_of

DEV = Path("/dev")
PROGRAMS = ("/usr/sbin/sshd", "/usr/lib/openssh/sshd-session")
# `sshd-session: NAME@pts/3,pts/4`; a session without a terminal (scp, an editor) has `@notty`. `[priv]` is its monitor.
_TITLE = re.compile(rb"sshd(?:-session)?: .+@([^@\s]+)")
_TERMINAL = re.compile(r"pts/[0-9]+")
# The servers of tmux and screen by the kernel's name of their processes. A user who names another process so keeps
# his pod until its limit, as an idle tmux does.
KEEPERS = ("tmux: server", "screen")
MAJORS = range(136, 144)  # the kernel's device numbers of /dev/pts


def find_sessions() -> dict[int, str]:
    """Return the sshd processes that serve one user each, with the terminals in their titles."""
    sessions = {}
    for directory in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            title = _TITLE.fullmatch((directory / "cmdline").read_bytes().partition(b"\0")[0].rstrip())
            if title and (_is_sshd(directory) or _is_sshd(PROC / status_of(directory)["PPid"])):
                sessions[int(directory.name)] = title[1].decode(errors="replace")
    return sessions


def _is_sshd(directory: Path) -> bool:
    """Tell if it is root's own sshd.

    A session's process runs as its user, and its program is not readable without SYS_PTRACE: check its parent, which is
    root's and has no other children.
    """
    if set(status_of(directory)["Uid"].split()) != {"0"}:
        return False
    try:
        return str((directory / "exe").readlink()) in PROGRAMS
    except PermissionError:
        return True  # a process that has been another user hides its program, even from root without SYS_PTRACE


def terminals(sessions: Mapping[int, str]) -> list[Path]:
    return [DEV / name for names in sessions.values() for name in names.split(",") if _TERMINAL.fullmatch(name)]


def find_keepers() -> dict[int, set[int]]:
    """Return the user ids that run tmux or screen here, with the numbers of the terminals of their windows."""
    keepers: dict[int, int] = {}
    windows: list[tuple[int, int, int]] = []
    for directory in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            status = status_of(directory)
            uid = int(status["Uid"].split()[0])
            if not uid or status["State"].startswith("Z"):
                continue
            if status["Name"] in KEEPERS:
                keepers[int(directory.name)] = uid
            # After the name, which may hold anything: state, parent, group, session, terminal.
            fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if (terminal := int(fields[4])) and terminal >> 8 & 0xFFF in MAJORS:
                number = (terminal & 0xFF | terminal >> 12 & 0xFFF00) + 256 * ((terminal >> 8 & 0xFFF) - MAJORS.start)
                windows.append((int(status["PPid"]), uid, number))
    keepers_by_user: dict[int, set[int]] = {uid: set() for uid in keepers.values()}
    for parent, uid, number in windows:
        if keepers.get(parent) == uid:
            keepers_by_user[uid].add(number)
    return keepers_by_user


def tell(paths: Iterable[Path], text: str) -> list[Path]:
    """Write to terminals like wall, which needs a utmp that containers lack; return those that took it.

    A stopped terminal must not block us.
    """
    message = f"\r\n*** minivm: {text} ***\r\n".encode()
    reached = []
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.isatty(descriptor):
                    os.write(descriptor, message)
                    reached.append(path)
            finally:
                os.close(descriptor)
    return reached
