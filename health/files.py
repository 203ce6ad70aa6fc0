"""Small files, published whole: a reader sees one or the one before it, also after the power has failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def publish(path: Path, data: bytes, mode: int = 0o644) -> None:
    """By unique temporary, fsync and rename, in a directory that is there."""
    # Its name begins with a dot and ends in a number: no reader that takes every *.json or *.prom takes it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: object, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, json.dumps(data, separators=(",", ":")).encode(), mode)


def read_json(path: Path) -> Mapping[str, Any]:
    """The mapping in it; empty where there is none, or the file is missing or damaged: nothing is known from it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
