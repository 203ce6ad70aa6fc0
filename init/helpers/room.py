"""Is there room where the controller keeps its state? slurmctld goes on with a full disk: it refuses every job that is
submitted, forgets with its next restart what it could not write, and calls itself well all the while.

    python3 -I -m init.helpers.room DIRECTORY...

Exit code 1, and what is wrong as the only line: it becomes the reason for which the pod is degraded.
"""

from __future__ import annotations

import errno
import os
import sys

FULL_PERCENT = 95
BLOCK = 4096


def wrong(directory: str) -> str:
    """What a person is told of it; empty if it is as it should be, or not of this pod."""
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{directory} cannot be asked for its room: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"{directory} is read-only"
    # What root alone may still take is no room for a daemon. Some file systems count no inodes.
    for what, total, left in (("", found.f_blocks, found.f_bavail), (": inodes", found.f_files, found.f_favail)):
        used = 100 - 100 * left / total if total else 0.0
        if used >= FULL_PERCENT:
            return f"{directory} is full{what}" if left == 0 else f"{directory} is {used:.0f} % full{what}"
    return refused(directory) if os.access(directory, os.W_OK) else ""


def refused(directory: str) -> str:
    """A quota, or a disk that fails, shows in a write alone. The file has no name: nothing of it stays."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        without = error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
        return "" if without else f"{directory} cannot be written: {error.strerror}"
    try:
        left = BLOCK
        while left:  # a quota takes what still fits
            left -= os.write(descriptor, bytes(left))
        os.fsync(descriptor)
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def main(directories: list[str]) -> int:
    found = [why for why in map(wrong, directories) if why]
    if found:
        print("; ".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
