"""A login pod before it stops: nobody new, a word to those who are there, and their sessions' grace."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from init.drain import Deadline, say

NOLOGIN = Path("/run/nologin")
MESSAGE = "This login pod is about to stop. Jobs are not affected. Log in again for a new pod.\n"
LOOK_EVERY = 0.5
PROC = Path("/proc")


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


def find_sessions(proc: Path = PROC) -> list[int]:
    """Pids of the sshd processes that serve one user each: their title is `sshd-session: NAME@...`, or `sshd: ...`."""
    found = []
    for directory in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (directory / "cmdline").read_bytes().partition(b"\0")[0]
            program, _, rest = title.partition(b": ")
            if program in (b"sshd-session", b"sshd") and b"@" in rest and not rest.endswith(b"[priv]"):
                found.append(int(directory.name))
    return sorted(found)


def terminals(sessions: list[int], proc: Path = PROC) -> list[str]:
    """The terminals named in the titles: `NAME@pts/3`. A session without one (scp, an editor) has `@notty`."""
    found = []
    for pid in sessions:
        with contextlib.suppress(OSError):
            title = (proc / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
            found += [f"/dev/{name}" for name in title.partition("@")[2].split(",") if name.startswith("pts/")]
    return found


def tell(paths: list[str], seconds: float) -> int:
    """Like wall, without the need for a utmp that containers do not keep. A stopped terminal must not stop us."""
    text = f"\r\n*** minivm: this pod stops in {seconds:.0f} s. Save your work and log out. ***\r\n".encode()
    told = 0
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                os.write(descriptor, text)
                told += 1
            finally:
                os.close(descriptor)
    return told
