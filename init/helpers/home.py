"""Check that users can enter and use the shared home; their jobs end at once with `0:53` where they cannot.

    python3 -I -m init.helpers.home DIRECTORY VOLUME

Exit code 1 and one line, which becomes the reason for which the pod is degraded. VOLUME is how the cluster names it.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from init.helpers import room


def find_fault(directory: str) -> str:
    """Return the first fault with its remedy; "" if users can work."""
    try:
        status = Path(directory).stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    # A group of all users may stand in for "everybody"; root's own group does not.
    if not status.st_mode & stat.S_IXOTH and not (status.st_mode & stat.S_IXGRP and status.st_gid):
        return f"users may not enter it: its mode is {mode}, and jobs end with 0:53; chmod 0755 {directory}"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"every user may rename and remove other users' homes: its mode is {mode}; chmod 0755 {directory}"
    return room.wrong(directory).removeprefix(f"{directory} ")


def main(arguments: list[str]) -> int:
    directory, volume = arguments
    if fault := find_fault(directory):
        print(f"{directory} ({volume}): {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
