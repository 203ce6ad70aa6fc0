"""A short program is run to its end, for its words. Never in PID 1, which waits for its children in one place."""

from __future__ import annotations

import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def ran(
    argv: Sequence[str], *, within: float | None = None, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """How it ended, and both its streams as text. It has nothing to read; TimeoutExpired where it takes longer."""
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=within, env=env,
        check=False, **more,
    )  # fmt: skip
