"""ConfigMaps and Secrets as directories, updated like a kubelet does.

..2026_11_20T10_00_00.123456/slurm.conf   the content, a new directory for every change
..data -> ..2026_11_20T10_00_00.123456    swapped by rename: a reader sees all old or all new
slurm.conf -> ..data/slurm.conf
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from ground.files import write_whole

DATA = "..data"


def published(directory: Path) -> dict[str, bytes]:
    """Return the files that a reader of the directory sees now."""
    data = directory / DATA
    return {path.name: path.read_bytes() for path in data.iterdir()} if data.is_symlink() else {}


def publish(directory: Path, files: Mapping[str, bytes], *, mode: int) -> bool:
    """Let the directory show exactly these files; return whether anything changed."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / DATA).is_symlink() and published(directory) == dict(files):
        return False
    fresh = directory / f"..{uuid.uuid4().hex}"
    fresh.mkdir(mode=0o755)
    for name, content in files.items():
        write_whole(fresh / name, content, mode)  # a key is at no moment readable by other users
    old = directory / DATA
    previous = directory / old.readlink() if old.is_symlink() else None
    point(old, fresh.name)
    for name in files:
        if not (directory / name).is_symlink():
            point(directory / name, f"{DATA}/{name}")
    for link in directory.iterdir():
        if link.is_symlink() and link.name != DATA and link.name not in files:
            link.unlink()
    if previous is not None:
        shutil.rmtree(previous, ignore_errors=True)
    return True


def point(link: Path, target: str) -> None:
    """Create a symbolic link, moved into place by rename."""
    temporary = link.with_name(f"..{uuid.uuid4().hex}")
    temporary.symlink_to(target)
    temporary.replace(link)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only its owner can ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, 0o600)
