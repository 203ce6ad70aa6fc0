"""How a reader uses the published tree: resolve the link once, hold the commit while reading, let go.

    with lease.hold() as held:
        run(held.path / "prolog.d" / ..., env={"MINIVM_SCRIPTS_COMMIT": held.commit})

- `held.path` is an absolute path to one commit's directory. It never passes through the `current` link, so a
  publish in the middle of a prolog changes nothing for that prolog.
- While a root process holds the lease (a shared flock on `leases/<commit>`, released by the kernel when the process
  ends, however it ends) the tree is not pruned.
- A reader that is not root (a task prolog runs as the job's user) gets the path with `locked == False`: the lock
  files are root's, so that no user can keep trees alive or block root's readers. Such a reader is covered by time
  instead: a tree stays for MINIVM_GITSYNC_KEEP_SECONDS after it stopped being current.
- Nothing published, or an unreadable root: generation zero, from the image, commit "zero".
- `report()` tells gitsync that a script of a commit is broken; gitsync passes it on to the ring.

Standard library only and little of it: a prolog pays for every import.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gitsync.errors import GitsyncError
from gitsync.layout import ZERO, Layout, commit_of_link

# A publish and a prune can both come between reading the link and locking; each retry needs another of both.
ATTEMPTS = 20


class Lease:
    """One commit's tree, held by its reader."""

    __slots__ = ("commit", "fd", "path")

    def __init__(self, commit: str, path: Path, fd: int | None) -> None:
        self.commit = commit
        self.path = path
        self.fd = fd

    @property
    def locked(self) -> bool:
        return self.fd is not None

    def release(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(layout: Layout | None = None) -> Lease:
    """The current commit, resolved now and held until released."""
    layout = layout or Layout.from_environment()
    name = ZERO
    for _ in range(ATTEMPTS):
        name = _current(layout)
        if name == ZERO:
            return _zero(layout)
        fd, raced = _lock(layout.lease(name))
        # The lock alone proves nothing: the pruner may have removed the tree between our two looks.
        if not raced and layout.tree(name).is_dir():
            return Lease(name, layout.tree(name), fd)
        if fd is not None:
            os.close(fd)
    # Lock files that somebody removed must not stop jobs; the current tree is never pruned.
    return Lease(name, layout.tree(name), None) if layout.tree(name).is_dir() else _zero(layout)


def _current(layout: Layout) -> str:
    try:
        target = str(layout.current.readlink())
    except OSError:
        return ZERO
    return commit_of_link(target, layout.zero) or ZERO


def _zero(layout: Layout) -> Lease:
    if not layout.zero.is_dir():
        raise GitsyncError("use the scripts", "nothing is published and the image's tree is missing", file=layout.zero)
    return Lease(ZERO, layout.zero, None)


def _lock(path: Path) -> tuple[int | None, bool]:
    """(the locked descriptor or None where this reader may not lock, whether the pruner was faster)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, True
    except OSError:
        return None, False
    try:
        # Never wait: only the pruner locks exclusively, and then this tree is going.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None, True
    except OSError:
        # A file system without flock: time covers this reader.
        os.close(fd)
        return None, False
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None, True
    return fd, False


def report(commit: str, script: str, reason: str, layout: Layout | None = None) -> bool:
    """Say that `script` of `commit` is broken (it crashed, hung, did not parse). False where nobody can be told."""
    import json
    import time

    from ground.files import write_whole

    layout = layout or Layout.from_environment()
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in f"{commit[:12]}-{script}")
    record = {"commit": commit, "script": script, "reason": reason[:2000], "at": time.time()}
    try:
        write_whole(layout.reports / f"{name}.json", json.dumps(record))
    except OSError:
        return False
    return True
