"""Drain of a login pod: refuse new logins, warn the users, wait, then end their `srun` and `salloc`.

Those would leave their nodes allocated. A pod that keeps its sessions lets them stay for hours first: see
`init.drain.stay`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from init.drain import stay
from init.drain.deadline import PROC, Deadline, report, status_of
from init.drain.sessions import find_sessions, tell, terminals
from init.drain.stay import NOLOGIN
from init.places import pod_name

MESSAGE = "This login pod is about to stop. Batch jobs are not affected. Log in again for a new pod.\n"
LOOK_EVERY = 0.5
# Part of the budget for interactive jobs to release their nodes.
KEPT = 5.0
CLIENTS = ("srun", "salloc")
ADVICE = "Save your work and log out; srun and salloc end with it."


def drain(controller: str, deadline: Deadline) -> None:
    kept = min(KEPT, deadline.left / 4)
    if stay.is_wanted(os.environ):
        stay.Stay(deadline, kept, pod_name(os.environ), os.environ.get("MINIVM_POD_IP", "")).run()
    else:
        end_sessions(deadline, kept)
    end_clients(deadline)


def end_sessions(deadline: Deadline, kept: float) -> None:
    try:
        NOLOGIN.write_text(MESSAGE)
    except OSError as error:  # a user may have filled the disk: the sessions still get their time
        report(f"cannot refuse new logins: {error.strerror}")
    sessions = find_sessions()
    if sessions:
        count = len(tell(terminals(sessions), f"this pod stops in {deadline.left:.0f} s. {ADVICE}"))
        report(f"warned {count} terminals of {len(sessions)} sessions")
        # At the end of the budget sshd's own stop hangs up on the remaining sessions.
        while (sessions := find_sessions()) and deadline.left > kept:
            deadline.pause(min(LOOK_EVERY, deadline.left - kept))
        report(f"{len(sessions)} sessions are left" if sessions else "all sessions have ended")
    else:
        report("no sessions")


def resume(controller: str) -> None:
    NOLOGIN.unlink(missing_ok=True)
    stay.forget()
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
