"""Check that the directories which daemons write have free space.

slurmctld continues on a full disk: it refuses every submitted job, forgets at its next restart what it could not write,
and reports itself healthy all the while.

python3 -I -m init.helpers.room DIRECTORY...

On failure the exit code is 1, and the only line is the reason for the pod's degraded state.
"""

from __future__ import annotations

import errno
import os
import sys

FULL_PERCENT = 95
BLOCK = 4096


def wrong(directory: str) -> str:
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
    return refused(directory) if os.access(directory, os.W_OK) else ""


def refused(directory: str) -> str:
    """Test a write, which alone shows a quota or a failing disk. The file has no name: nothing of it remains."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        without = error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
        return "" if without else f"{directory} cannot be written: {error.strerror}"
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


def main(directories: list[str]) -> int:
    problems: dict[object, str] = {}
    for directory in directories:
        if fault := wrong(directory):
            # One file system under several directories is told once.
            problems.setdefault(file_system(directory), fault)
    if problems:
        print("; ".join(problems.values()))
    return 1 if problems else 0


def file_system(directory: str) -> object:
    try:
        return os.stat(directory).st_dev  # noqa: PTH116  # text, as all in this module
    except OSError:
        return directory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
