"""Reader's side of the published tree: resolve the link once, hold the commit while reading, release it.

    with lease.hold() as held:
        run(held.path / "prolog.d" / ..., env={"MINIVM_SCRIPTS_COMMIT": held.commit})

- `held.path` is an absolute path to one commit's directory. It never passes through the `current` link, so a
  publish in the middle of a prolog changes nothing for that prolog.
- While a root process holds the lease (a shared flock on `leases/<commit>`, which the kernel releases when the process
  ends), gitsync does not prune the tree.
- A reader that is not root (a task prolog runs as the job's user) gets the path with `locked == False`: root owns the
  lock files, so no user can keep trees alive or block root's readers. Time protects such a reader instead: gitsync
  keeps a tree for MINIVM_GITSYNC_KEEP_SECONDS after it stopped being current.
- With nothing published, or an unreadable root, readers get generation zero from the image, commit "zero".
- `report()` tells gitsync that a script of a commit is broken; gitsync forwards it to the ring.

Few imports, all from the standard library: every prolog pays for them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gitsync.errors import GitsyncError
from gitsync.layout import ZERO, Layout, commit_of_link

# Bound on retries: each one needs another publish and another prune between reading the link and locking.
ATTEMPTS = 20


class Lease:
    """A hold on one commit's tree; prevents pruning while `locked`."""

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
    """Resolve the current commit and hold it until released."""
    layout = layout or Layout.from_environment()
    name = ZERO
    for _ in range(ATTEMPTS):
        name = _current(layout)
        if name == ZERO:
            return _zero(layout)
        fd, raced = _lock(layout.lease(name))
        # The lock alone proves nothing: the pruner may have removed the tree between reading the link and locking.
        if not raced and layout.tree(name).is_dir():
            return Lease(name, layout.tree(name), fd)
        if fd is not None:
            os.close(fd)
    # Missing lock files must not stop jobs; gitsync never prunes the current tree.
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
    """Lock a lease file. Returns the descriptor (None without permission) and whether the pruner was faster."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, True
    except OSError:
        return None, False
    try:
        # Do not wait: only the pruner locks exclusively, and it is removing this tree.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None, True
    except OSError:
        # The file system has no flock: MINIVM_GITSYNC_KEEP_SECONDS protects this reader.
        os.close(fd)
        return None, False
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None, True
    return fd, False


def report(commit: str, script: str, reason: str, layout: Layout | None = None) -> bool:
    """Record for gitsync that `script` of `commit` is broken (crashed, hung, did not parse); return success."""
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
