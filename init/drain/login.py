"""A login pod before it stops: nobody new, a word to those who are there, and their sessions' grace; at last an end to
the `srun` and `salloc` that would leave their nodes taken.

Who is there is read from the names of processes, and any user gives his own processes any name. So a session is what
root's sshd has as a child, and a word goes to nothing but a terminal.
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
# Of the budget, for interactive jobs to give back their nodes.
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
    except OSError as error:  # a disk that somebody has filled: those who are there have their time all the same
        report(f"new logins are not kept out: {error.strerror}")
    kept = min(KEPT, deadline.left / 4)
    sessions = find_sessions()
    if sessions:
        count = tell(terminals(sessions), deadline.left)
        report(f"told {count} terminals of {len(sessions)} sessions")
        # The end of the budget is the end of the wait; sshd's own stop then hangs up on those who stayed.
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
    """Every srun and salloc, those in a screen or tmux too: with the pod they are gone without a word to slurmctld, and
    their nodes would stay taken. As when a terminal goes away, they say on theirs what they do, and end their jobs.
    """
    clients = find_clients()
    if not clients:
        return
    number = signal.SIGHUP
    for left in (deadline.left / 2, 1.0):
        # Who was started to outlive its terminal is told a second time, otherwise.
        for pid in clients:
            hang_up(pid, number)
        while (clients := find_clients()) and deadline.left > left:
            deadline.pause(0.1)
        number = signal.SIGTERM
    report(f"{len(clients)} srun and salloc are left" if clients else "every srun and salloc has ended its job")


def find_clients() -> list[int]:
    """By name, which is enough: whoever lends it to another process of his lends it to one that ends with the pod."""
    return [int(directory.name) for directory in PROC.glob("[0-9]*") if _is_client(directory)]


def _is_client(directory: Path) -> bool:
    with contextlib.suppress(OSError, KeyError):
        status = status_of(directory)
        # One number: in no container within this one.
        ours = len(status["NSpid"].split()) == 1 and status["Uid"].split()[0] != "0"
        return ours and status["Name"] in CLIENTS and not status["State"].startswith("Z")
    return False


def hang_up(pid: int, number: int) -> None:
    """By a descriptor of the process: its number may be another's by now, and that one root's."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_client(PROC / str(pid)):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def find_sessions() -> dict[int, str]:
    """The sshd processes that serve one user each, and what their titles say of terminals."""
    found = {}
    for directory in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            title = _TITLE.fullmatch((directory / "cmdline").read_bytes().partition(b"\0")[0].rstrip())
            if title and (_is_sshd(directory) or _is_sshd(PROC / status_of(directory)["PPid"])):
                found[int(directory.name)] = title[1].decode(errors="replace")
    return found


def _is_sshd(directory: Path) -> bool:
    """Root's own sshd. The process of a session is its user's, and what that one runs may not be looked at without
    SYS_PTRACE: its parent is root's, and nobody else becomes a child of that."""
    if set(status_of(directory)["Uid"].split()) != {"0"}:
        return False
    try:
        return str((directory / "exe").readlink()) in PROGRAMS
    except PermissionError:
        return True  # one that has been another user for a moment hides its program, from root without SYS_PTRACE too


def terminals(sessions: Mapping[int, str]) -> list[Path]:
    return [DEV / name for names in sessions.values() for name in names.split(",") if _TERMINAL.fullmatch(name)]


def tell(paths: Iterable[Path], seconds: float) -> int:
    """Like wall, without the need for a utmp that containers do not keep. A stopped terminal must not stop us."""
    what = "Save your work and log out; srun and salloc end with it."
    word = f"\r\n*** minivm: this pod stops in {seconds:.0f} s. {what} ***\r\n".encode()
    count = 0
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.isatty(descriptor):
                    os.write(descriptor, word)
                    count += 1
            finally:
                os.close(descriptor)
    return count
