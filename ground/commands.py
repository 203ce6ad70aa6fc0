"""Run a short program and collect its output, and keep processes below this one.

PID 1 runs no program by these functions: it waits for its children in one place.
"""

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


class OutputTooLongError(Exception):
    """The command printed more than it may, and was killed."""


def ran_bounded(
    argv: Sequence[str], most: int, *, within: float, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run `argv` as `ran` does; raise OutputTooLongError once it has printed more than `most` bytes."""
    import threading  # imported late: most callers use `ran`
    from tempfile import TemporaryFile

    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    with TemporaryFile() as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=env, **more
        )
        timer = threading.Timer(within, end)
        timer.start()
        with process:
            text = process.stdout.read(most + 1) if process.stdout else b""
            if len(text) > most:
                process.kill()
        timer.cancel()
        errors.seek(0)
        message = errors.read(most)
    if len(text) > most:
        raise OutputTooLongError
    if late.is_set():
        raise subprocess.TimeoutExpired(argv, within, text, message)
    decoded = (output.decode(errors="replace") for output in (text, message))
    return subprocess.CompletedProcess(argv, process.returncode, *decoded)


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, as PID 1 is without this call."""
    import ctypes  # imported late: only two callers need it

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
