"""Remove what a user has left in a directory that all users share, with the user's rights."""

# Pathlib costs an epilog more than all it does here.
# ruff: noqa: PTH101, PTH208
import contextlib
import os
import signal
import stat
from collections.abc import Iterable

from jobs import UID

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(name: str, above: int) -> int:
    """Open a directory of the user with any mode; never follow a link."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
        return os.open(".", DIRECTORY, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def sweep(top: int, patience: int) -> Iterable[object]:
    """By descriptors: no name that was looked at can lead elsewhere by the time it is removed.

    What lies deeper is moved up first, so that no depth costs us descriptors or a stack.
    """
    # By itself, whatever the user left: the rest has to go on.
    signal.alarm(patience)
    names = [entry.name for entry in os.scandir(top) if entry.stat(follow_symlinks=False).st_uid == UID]
    moved = 0
    while names:
        name = names.pop()
        try:
            os.unlink(name, dir_fd=top)
            yield "file"
            continue
        except IsADirectoryError:
            pass
        except OSError:
            continue
        with contextlib.suppress(OSError):
            folder = opened(name, top)
            try:
                for inner in os.listdir(folder):
                    with contextlib.suppress(OSError):
                        try:
                            os.unlink(inner, dir_fd=folder)
                            yield "file"
                        except IsADirectoryError:
                            moved += 1
                            higher = f".minivm-{os.getpid()}-{moved}"
                            os.close(opened(inner, folder))
                            os.rename(inner, higher, src_dir_fd=folder, dst_dir_fd=top)
                            names.append(higher)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
            yield "directory"


def is_anything_his(place: str) -> bool:
    """Root looks; who removes is a child."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == UID:
                    return True
    return False
