"""Programs of the engine's own machine, while packages of another architecture are installed.

What unpacks, copies and searches does the same on every machine, and qemu takes ten times as long for it. The layer
`native` has such programs in a directory that works in any root; they come first in PATH for as long as a step lasts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import IO, cast

from images.engine.builder import Tools
from images.engine.docker import Engine

# Every Debian has it, and no package puts anything there.
AT = "/mnt"
HERE = f"{AT}/minivm"
PATH = f"{HERE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def tools(image: str) -> Tools:
    return Tools(image, AT, {"PATH": PATH, "APT_CONFIG": f"{HERE}/apt.conf"})


def packed(engine: Engine, image: str, target: Path) -> Path:
    """The same directory as a tar, for a root that no engine makes."""
    with engine.container(image) as container, engine.read_path(container, HERE) as tar, target.open("wb") as copy:
        whole = cast("IO[bytes]", tar.fileobj)  # it was opened from one
        whole.seek(0)
        shutil.copyfileobj(whole, copy)
    return target
