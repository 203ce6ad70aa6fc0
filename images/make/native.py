"""Run the engine's own programs while packages of another architecture are installed.

Programs that unpack, copy and search do the same on every machine, and under qemu take ten times as long. The layer
`native` has such programs in a directory that works in any root; a step has them first in its PATH.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import IO, cast

from images.engine.builder import Tools
from images.engine.docker import DockerEngine

# Every Debian has it, and no package puts anything there.
AT = "/mnt"
HERE = f"{AT}/minivm"
PATH = f"{HERE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def tools(image: str) -> Tools:
    return Tools(image, AT, {"PATH": PATH, "APT_CONFIG": f"{HERE}/apt.conf"})


def packed(engine: DockerEngine, image: str, target: Path) -> Path:
    """Pack the directory as a tar, for a root that no engine builds."""
    with engine.container(image) as container, engine.read_path(container, HERE) as tar, target.open("wb") as copy:
        whole = cast("IO[bytes]", tar.fileobj)  # it was opened from one
        whole.seek(0)
        shutil.copyfileobj(whole, copy)
    return target
