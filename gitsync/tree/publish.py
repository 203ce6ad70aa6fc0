"""The steps that readers can see: a tree gets its name, the link moves, old trees go. And what heals a cut one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gitsync import fault
from gitsync.errors import GitsyncError
from gitsync.layout import UNFINISHED, ZERO, Layout, commit_of_link, is_commit
from gitsync.tree import disk
from gitsync.tree.write import Written
from ground.files import locked


def unfinished(near: Path, what: str) -> Path:
    return near / f"{UNFINISHED}{what}-{os.getpid()}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def beginning(layout: Layout) -> Iterator[Path]:
    """Where a tree is made until `name_tree` has named it; what has no name at the end is gone."""
    target = unfinished(layout.trees, "new")
    try:
        yield target
    finally:
        if target.exists():
            disk.remove(target)


def prepare(layout: Layout) -> None:
    for directory, mode in (
        (layout.root, 0o755),
        (layout.trees, 0o755),
        (layout.leases, 0o755),
        # The runner, as root, drops reports here; nobody else may speak for the node.
        (layout.reports, 0o700),
    ):
        try:
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise GitsyncError("make gitsync's directories", why, file=directory, hint="MINIVM_GITSYNC_ROOT") from error


def heal(layout: Layout) -> list[str]:
    """Remove what a cut cycle left behind. Called under the lock, so nothing of it is in use."""
    done = []
    for directory in (layout.root, layout.trees, layout.leases):
        for path in directory.iterdir():
            if path.name.startswith(UNFINISHED):
                disk.remove(path)
                done.append(f"removed {path.name}")
    for path in layout.root.glob(".*.json.*"):
        path.unlink(missing_ok=True)
    if layout.repository.is_dir():
        # Under the lock no git is alive here: each of these belongs to a dead one, and would stop the next.
        for base, _, files in os.walk(layout.repository):
            for name in files:
                if name.endswith(".lock") or name.startswith(("tmp_", ".tmp-")):
                    Path(base, name).unlink(missing_ok=True)
                    done.append(f"removed git's {name}")
    for path in layout.leases.iterdir():
        if is_commit(path.name) and not layout.tree(path.name).is_dir():
            path.unlink(missing_ok=True)
    return done


def current(layout: Layout) -> str | None:
    """The commit that readers get; None where the link is missing, foreign or leads nowhere."""
    try:
        commit = commit_of_link(str(layout.current.readlink()), layout.zero)
    except OSError:
        return None
    return commit if commit is not None and layout.tree(commit).is_dir() else None


def name_tree(layout: Layout, finished: Path, commit: str, written: Written) -> None:
    """`finished` becomes trees/<commit>, once all its bytes are on the disk."""
    disk.sync_tree(finished, written.files)
    fault.at("tree-synced")
    # The lease exists before the tree: a reader never finds a tree that it cannot lock.
    os.close(os.open(layout.lease(commit), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    target = layout.tree(commit)
    if target.exists():
        disk.exchange(finished, target)
        disk.remove(finished)
    else:
        finished.rename(target)
    disk.sync_directory(layout.trees)
    fault.at("tree-named")


def point(layout: Layout, commit: str) -> None:
    """Move the link: readers get the old tree or the new one, never nothing."""
    target = str(layout.zero) if commit == ZERO else f"trees/{commit}"
    temporary = unfinished(layout.root, "link")
    temporary.symlink_to(target)
    # The link's own inode must be on disk before the name moves to it, or a crash leaves an empty link.
    disk.sync_directory(layout.root)
    fault.at("link-made")
    temporary.rename(layout.current)
    disk.sync_directory(layout.root)
    fault.at("link-swapped")


def prunable(
    trees: Iterable[str], current: str | None, history: Sequence[tuple[str, float]], keep: int, keep_seconds: float,
    now: float,
) -> list[str]:  # fmt: skip
    """Which trees may go. Pure. `history`: commits with the time at which each became current, newest first.

    Kept: the current one, `keep` trees in all by recency, and whatever stopped being current less than `keep_seconds`
    ago, for readers that cannot lock.
    """
    order = [commit for commit, _ in history]
    ended: dict[str, float] = {}
    successor = now
    for commit, began in history:
        ended[commit] = successor
        successor = began
    candidates = sorted(
        (each for each in trees if each != current),
        key=lambda each: order.index(each) if each in order else len(order),
    )
    spare = candidates[max(keep - 1, 0) :]
    return [each for each in spare if now - ended.get(each, 0.0) >= keep_seconds]


def remove_tree(layout: Layout, commit: str) -> bool:
    """Remove a tree unless a reader holds it; whether it went. First goes its name, then its lease, then its files."""
    lease = layout.lease(commit)
    fd = os.open(lease, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locked(fd):
            return False
        grave = unfinished(layout.trees, "old")
        layout.tree(commit).rename(grave)
        fault.at("tree-unnamed")
        lease.unlink(missing_ok=True)
        fault.at("lease-removed")
    finally:
        os.close(fd)
    disk.remove(grave)
    fault.at("pruned")
    return True


def present(layout: Layout) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in layout.trees.iterdir() if is_commit(path.name))
    return []


def since(layout: Layout, *, otherwise: float) -> float:
    """When the link last moved, by the link itself."""
    try:
        return layout.current.lstat().st_mtime
    except OSError:
        return otherwise
