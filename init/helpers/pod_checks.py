"""Periodic checks of the pod. Exit code 1 and one line, which becomes the reason for the pod's degraded state.

    python3 -I -m init.helpers.pod_checks room DIRECTORY...
    python3 -I -m init.helpers.pod_checks home DIRECTORY VOLUME
    python3 -I -m init.helpers.pod_checks reserved-ids

`room`: the directories that daemons write have free space. slurmctld continues on a full disk: it refuses every
submitted job, forgets at its next restart what it could not write, and reports itself healthy all the while.

`home`: users can enter and use the shared home; their jobs end at once with `0:53` where they cannot. VOLUME is how the
cluster names it.

`reserved-ids`: no user of the site's directory has a user id that the epilog works under. A user with such an id could
end the processes that clean up after other users' jobs.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import sys
import time
from collections.abc import Callable, Iterator

FULL_PERCENT = 95
BLOCK = 4096
# The same as RESERVED in scripts/lib/jobs.py, which a git commit delivers and which imports nothing from here.
RESERVED = range(64500, 65000)
SHOWN = 3
# The next run asks a slow directory again.
PATIENCE = 60.0


def check_room(*directories: str) -> str:
    problems: dict[object, str] = {}
    for directory in directories:
        if problem := space_problem(directory):
            # Report one file system under several directories once.
            problems.setdefault(_file_system(directory), problem)
    return "; ".join(problems.values())


def space_problem(directory: str) -> str:
    """Return the problem for a person; "" if there is none, or if the directory is not this pod's."""
    try:
        status = os.statvfs(directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{directory} cannot be checked for free space: {error.strerror}"
    if status.f_flag & os.ST_RDONLY:
        return f"{directory} is read-only"
    # Space reserved for root is no space for a daemon. Some file systems count no inodes.
    for what, total, available in (
        ("", status.f_blocks, status.f_bavail),
        (": inodes", status.f_files, status.f_favail),
    ):
        used = 100 - 100 * available / total if total else 0.0
        if used >= FULL_PERCENT:
            return f"{directory} is full{what}" if available == 0 else f"{directory} is {used:.0f} % full{what}"
    return _write_problem(directory) if os.access(directory, os.W_OK) else ""


def _write_problem(directory: str) -> str:
    """Test a write, which alone shows a quota or a failing disk. The file has no name: nothing of it remains."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
        return "" if unsupported else f"{directory} cannot be written: {error.strerror}"
    try:
        unwritten = BLOCK
        while unwritten:  # a quota accepts what still fits
            unwritten -= os.write(descriptor, bytes(unwritten))
        os.fsync(descriptor)
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def _file_system(directory: str) -> object:
    try:
        return os.stat(directory).st_dev  # noqa: PTH116  # text, as all in this module
    except OSError:
        return directory


def check_home(directory: str, volume: str) -> str:
    problem = home_problem(directory)
    return f"{directory} ({volume}): {problem}" if problem else ""


def home_problem(directory: str) -> str:
    """Return the first problem with its remedy; "" if users can work."""
    try:
        status = os.stat(directory)  # noqa: PTH116  # text, as all in this module
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    # A group with all users means every user; root's own group does not.
    if not status.st_mode & stat.S_IXOTH and not (status.st_mode & stat.S_IXGRP and status.st_gid):
        return f"users may not enter it: its mode is {mode}, and jobs end with 0:53; chmod 0755 {directory}"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"every user may rename and remove other users' homes: its mode is {mode}; chmod 0755 {directory}"
    return space_problem(directory).removeprefix(f"{directory} ")


def check_reserved_ids() -> str:
    """Return the ids without the users' names: the pod's public page shows the line."""
    used = list(_find_used_reserved_ids())
    if not used:
        return ""
    shown = ", ".join(used[:SHOWN]) + (f" and {len(used) - SHOWN} more" if len(used) > SHOWN else "")
    ids = f"{RESERVED[0]} to {RESERVED[-1]}"
    return f"the directory has users with ids that minivm reserves ({ids}): {shown}; give them other ids"


def _find_used_reserved_ids() -> Iterator[str]:
    until = time.monotonic() + PATIENCE
    for number in RESERVED:
        if time.monotonic() > until:
            return
        try:
            pwd.getpwuid(number)
        except KeyError:
            continue
        yield str(number)


def main(arguments: list[str]) -> int:
    checks: dict[str, Callable[..., str]] = {"room": check_room, "home": check_home, "reserved-ids": check_reserved_ids}
    problem = checks[arguments[0]](*arguments[1:])
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
