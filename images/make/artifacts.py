"""Copy paths from one image into another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from images.definition.spec import EntryKind
from images.make.content import Entry


def taken(tar: Any, to: str, contents: bool, kept: Path) -> Iterator[Entry]:
    """Yield an artifact's tar members at their new place. The first member is the path itself."""
    for index, member in enumerate(tar):
        inner = member.name.partition("/")[2]
        if index == 0 and member.isdir() and contents:
            continue
        path = f"{to}/{inner}".strip("/") if inner or not contents else to
        mode = member.mode & 0o7777
        if member.isdir():
            yield Entry(path, EntryKind.DIRECTORY, mode)
        elif member.issym():
            yield Entry(path, EntryKind.LINK, 0o777, link=member.linkname)
        elif member.isfile() or member.islnk():
            data = tar.extractfile(member)
            target = kept / str(index)
            with target.open("wb") as copy:
                shutil.copyfileobj(data, copy)
            yield Entry(path, EntryKind.FILE, mode, data=target)
