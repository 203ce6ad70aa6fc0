"""Small files, published whole: a reader sees one or the one before it, also after the power has failed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def write_whole(path: Path, data: bytes | str, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """By unique temporary, fsync and rename, in a directory that is there; seen with its mode and owner alone."""
    # Its name begins with a dot and does not end as the file's: no reader that takes every *.json or *.prom takes it.
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


def read_plain(path: Path, most: int) -> bytes | None:
    """The beginning of a plain file, where somebody else may have put it: a link leads nowhere, a pipe holds nobody up.
    None where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, most) if os.fstat(fd).st_mode & 0o170000 == 0o100000 else None
    finally:
        os.close(fd)


def locked(fd: int, within: float = 0.0) -> bool:
    """Whether the file was locked in this time; others that lock it wait, until the last copy of `fd` is closed."""
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
    """A set is written as a sorted list."""
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, separators=(",", ":"), default=sorted), mode)


def read_json(path: Path) -> Mapping[str, Any]:
    """The mapping in it; empty where there is none, or the file is missing or damaged: nothing is known from it."""
    import json

    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
