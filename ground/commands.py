"""Run a short program and collect its output. Not for PID 1, which waits for its children in one place."""

from __future__ import annotations

import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def ran(
    argv: Sequence[str], *, within: float | None = None, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run `argv` with an empty stdin; return its exit status and both streams as text.

    Raises TimeoutExpired after `within` seconds.
    """
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=within, env=env,
        check=False, **more,
    )  # fmt: skip
