"""Drain of a login pod: refuse new logins, warn the users, wait, then end their `srun` and `salloc`.

Those would leave their nodes allocated. Process names are no proof, since any user can choose them: a session is a
child of root's sshd, and warnings go to terminals only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from init.drain.deadline import PROC, Deadline, report, status_of

NOLOGIN = Path("/run/nologin")
MESSAGE = "This login pod is about to stop. Batch jobs are not affected. Log in again for a new pod.\n"
LOOK_EVERY = 0.5
# Part of the budget for interactive jobs to release their nodes.
KEPT = 5.0
CLIENTS = ("srun", "salloc")
DEV = Path("/dev")
PROGRAMS = ("/usr/sbin/sshd", "/usr/lib/openssh/sshd-session")
# `sshd-session: NAME@pts/3,pts/4`; a session without a terminal (scp, an editor) has `@notty`. `[priv]` is its monitor.
_TITLE = re.compile(rb"sshd(?:-session)?: .+@([^@\s]+)")
_TERMINAL = re.compile(r"pts/[0-9]+")


def drain(controller: str, deadline: Deadline) -> None:
    try:
        NOLOGIN.write_text(MESSAGE)
    except OSError as error:  # a user may have filled the disk: the sessions still get their time
        report(f"cannot refuse new logins: {error.strerror}")
    kept = min(KEPT, deadline.left / 4)
    sessions = find_sessions()
    if sessions:
        count = tell(terminals(sessions), deadline.left)
        report(f"warned {count} terminals of {len(sessions)} sessions")
        # At the end of the budget sshd's own stop hangs up on the remaining sessions.
        while (sessions := find_sessions()) and deadline.left > kept:
            deadline.pause(min(LOOK_EVERY, deadline.left - kept))
        report(f"{len(sessions)} sessions are left" if sessions else "all sessions have ended")
    else:
        report("no sessions")
    end_clients(deadline)


def resume(controller: str) -> None:
    NOLOGIN.unlink(missing_ok=True)
    report("logins are open")


def end_clients(deadline: Deadline) -> None:
    """End every srun and salloc, also those in screen or tmux.

    Killed with the pod, they would not notify slurmctld, and their nodes would stay allocated. On SIGHUP, as after a
    lost terminal, they print what they do and end their jobs.
    """
    clients = find_clients()
    if not clients:
        return
    number = signal.SIGHUP
    for left in (deadline.left / 2, 1.0):
        # A process started to survive its terminal ignores SIGHUP, so send SIGTERM next.
        for pid in clients:
            hang_up(pid, number)
        while (clients := find_clients()) and deadline.left > left:
            deadline.pause(0.1)
        number = signal.SIGTERM
    report(f"{len(clients)} srun and salloc are left" if clients else "every srun and salloc has ended its job")


def find_clients() -> list[int]:
    """Find them by name, which is enough: another process of that name ends with the pod anyway."""
    return [int(directory.name) for directory in PROC.glob("[0-9]*") if _is_client(directory)]


def _is_client(directory: Path) -> bool:
    with contextlib.suppress(OSError, KeyError):
        status = status_of(directory)
        # One number: not in a nested container.
        is_own = len(status["NSpid"].split()) == 1 and status["Uid"].split()[0] != "0"
        return is_own and status["Name"] in CLIENTS and not status["State"].startswith("Z")
    return False


def hang_up(pid: int, number: int) -> None:
    """Signal by a pidfd: the number may belong to another process by now, even one of root."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_client(PROC / str(pid)):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


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


def tell(paths: Iterable[Path], seconds: float) -> int:
    """Write to terminals like wall, which needs a utmp that containers lack. A stopped terminal must not block us."""
    advice = "Save your work and log out; srun and salloc end with it."
    message = f"\r\n*** minivm: this pod stops in {seconds:.0f} s. {advice} ***\r\n".encode()
    count = 0
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.isatty(descriptor):
                    os.write(descriptor, message)
                    count += 1
            finally:
                os.close(descriptor)
    return count
