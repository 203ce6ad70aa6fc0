"""Scripts of the image's own tree, in the runner's fork: no interpreter starts for what is read already.

A script is ours where a tree has it, and the library it imports, byte for byte as the image brings them. Whatever a
site wrote is a program that is started, as always.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from health.runner.kept import Kept
from health.script import OUTPUT_LIMIT, Outcome, why_broken

HEAD = b"#!/usr/bin/python3 -IS\n"
LIBRARY = "lib/jobs.py"


@dataclass(frozen=True, slots=True)
class Source:
    text: bytes
    # None: not one that could run here.
    code: CodeType | None


@dataclass(frozen=True, slots=True)
class Step:
    path: str
    code: CodeType
    library: CodeType
    lib: str


def read(path: str) -> Source:
    """A library has no first line; a script has ours, may be executed, and is Python."""
    try:
        text = Path(path).read_bytes()
        fits = path.endswith(".py") or (text.startswith(HEAD) and os.access(path, os.X_OK))
        return Source(text, compile(text, path, "exec") if fits else None)
    except (OSError, ValueError, SyntaxError):
        return Source(b"", None)


class Ours:
    def __init__(self, zero: Path, kept: Kept) -> None:
        self._zero = zero
        self._kept = kept

    def step(self, tree: Path, script: str) -> Step | None:
        """`script` is "epilog.d/10-clean-up"; None where it is to be started as a program."""
        code, library = self._same(tree, script), self._same(tree, LIBRARY)
        if code is None or library is None:
            return None
        return Step(f"{tree}/{script}", code, library, f"{tree}/lib")

    def _same(self, tree: Path, name: str) -> CodeType | None:
        places = f"{tree}/{name}", f"{self._zero}/{name}"
        mine, known = (self._kept.get(("source", path), [path], partial(read, path)) for path in places)
        return mine.code if mine.text == known.text else None


class Stopped(BaseException):
    """The run is given up. No SystemExit: a script ends by that."""


class _TooLong(BaseException):
    pass


# In this process: whether each step so far has come to its end. One that was cut may have left anything open.
whole = True


def run(step: Step, env: Mapping[str, str], deadline_s: float, unfit: int) -> Outcome:
    """In this process, which is a fork made for runs: another for each step would cost more than the steps do.

    What a step changes of it is put back: other steps follow, and other runs.
    """
    global whole
    start = time.monotonic()
    said, kept = os.memfd_create("step"), [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (1, 2)]
    ours, path, mask, code, broken = os.environ, sys.path[:], os.umask(0o022), 1, ""
    for fd in (1, 2):
        os.dup2(said, fd)
    # What a step starts is given this by name; the runner's own is not the step's.
    os.environ = dict(env)  # type: ignore[assignment]  # noqa: B003  # and the rest is for nobody
    signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        code = _execute(step)
        broken = why_broken(code, unfit)
    except _TooLong:
        broken = f"did not end within {deadline_s:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.environ = ours  # noqa: B003  # the very object
        sys.path[:] = path
        os.umask(mask)
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
    text = os.pread(said, OUTPUT_LIMIT, max(0, os.fstat(said).st_size - OUTPUT_LIMIT)).decode(errors="replace")
    os.close(said)
    whole = whole and not broken
    return Outcome(code, time.monotonic() - start, "", text, broken)


def _ring(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def _execute(step: Step) -> int:
    """The exit code, as Python makes it of how a script ends."""
    code: object = 0
    try:
        sys.argv = [step.path]
        library, script = ModuleType("jobs"), ModuleType("__main__")
        library.__file__, script.__file__ = f"{step.lib}/jobs.py", step.path
        sys.modules.update({"jobs": library, "__main__": script})
        exec(step.library, library.__dict__)  # what the image brings, and nothing else
        exec(step.code, script.__dict__)
    except SystemExit as end:
        code = end.code
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return (code or 0) & 0xFF
