"""Small files replaced atomically and durably: a reader sees the old or the new content, also after a power failure."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def write_whole(path: Path, data: bytes | str, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Write a file by unique temporary, fsync and rename. Its directory must exist.

    The file never appears with another mode or owner than the ones given.
    """
    # The temporary's name starts with a dot and has another suffix, so a reader of *.json or *.prom skips it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_temporaries(path: Path) -> None:
    """Remove the temporaries that killed writers of this file left. No other process may write it at the same time."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync_directory(directory: Path) -> None:
    """Make renames and removals in the directory outlive a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_if_possible(path: Path, data: bytes | str) -> bool:
    """Write a file that only informs, such as metrics, and make its directory; return whether it worked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError:
        return False
    return True


def rewrite(path: Path, data: bytes) -> None:
    """Overwrite a file in place and durably, for readers on other machines of an NFS volume; all data has one length.

    A renamed file could stay unseen on another machine for as long as that machine remembers the name; an open there
    asks for the file's own change.
    """
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_plain(path: Path, most: int, *, trusted: bool = False) -> bytes | None:
    """Read at most `most` bytes of a regular file in a directory that untrusted users may write to.

    Refuses a symbolic link and never blocks on a pipe. `trusted` also refuses a file that belongs neither to root nor
    to this process's user. Returns None when there is no such file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_mode & 0o170000 != 0o100000 or (trusted and status.st_uid not in (0, os.geteuid())):
            return None
        return os.read(fd, most)
    finally:
        os.close(fd)


def locked(fd: int, within: float = 0.0) -> bool:
    """Take an exclusive flock on `fd` within `within` seconds; return whether it was taken.

    The lock is released when the last copy of `fd` is closed.
    """
    import fcntl
    import time

    deadline = time.monotonic() + within
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def write_json(path: Path, data: object, mode: int = 0o644) -> None:
    """Write `data` as JSON, making the directory. A set becomes a sorted list."""
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, separators=(",", ":"), default=sorted), mode)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object. A missing or damaged file, or any other JSON value, reads as an empty mapping."""
    import json

    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
