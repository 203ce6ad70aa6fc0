"""State that a fork of the resident runner inherits: parsed files, and the image's own scripts, already compiled.

The fork runs such a script itself, so that no interpreter starts. This applies to a script if the tree has it, and the
library it imports, byte for byte as the image does. A site's own script is started as a program.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TypeVar, cast

from gitsync.lease import Lease
from health.places import Places
from health.policy import IN_A_TREE, RunnerPolicy, read_runner_policy
from health.script import OUTPUT_LIMIT, ScriptOutcome, why_broken

T = TypeVar("T")
Stamp = tuple[int, int, int, int]
MOST = 2000


def stamp(path: Path | str) -> Stamp | None:
    """Return a file's identity; None if it is missing or unreadable."""
    try:
        status = os.stat(path)  # noqa: PTH116  # before each job, some dozen times
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns


class FileCache:
    """Cache of values parsed from small files, valid while the files are unchanged.

    A file is identified by its inode, size and times; publishing writes a new file. Each run looks at a file once: a
    fork believes what the runner looked at just before forking.
    """

    def __init__(self) -> None:
        self._entries: dict[object, tuple[tuple[Stamp | None, ...], object]] = {}
        # Names requested since the last `look`.
        self._seen: set[object] = set()

    def look(self) -> None:
        """Begin another run: files are looked at again."""
        self._seen.clear()

    def get(self, name: object, files: Iterable[Path | str], read: Callable[[], T]) -> T:
        """Return what `read` gave for these files.

        The stamp precedes the read: a file that changes meanwhile is read again.
        """
        entry = self._entries.get(name)
        if entry is not None and name in self._seen:
            return cast(T, entry[1])
        now = tuple(map(stamp, files))
        self._seen.add(name)
        if entry is None or entry[0] != now:
            if len(self._entries) >= MOST:
                # Commits come and go; entries in use return with the next look.
                self._entries.clear()
            entry = self._entries[name] = now, read()
        return cast(T, entry[1])


HEAD = b"#!/usr/bin/python3 -IS\n"
LIBRARY = "lib/jobs.py"


@dataclass(frozen=True, slots=True)
class ScriptSource:
    text: bytes
    # None: the script cannot run here.
    code: CodeType | None


@dataclass(frozen=True, slots=True)
class CompiledScript:
    path: str
    code: CodeType
    library: CodeType
    lib: str


def read_source(path: str) -> ScriptSource:
    """Read and compile a source: a library (.py), or an executable Python script with the image's first line."""
    try:
        text = Path(path).read_bytes()
        fits = path.endswith(".py") or (text.startswith(HEAD) and os.access(path, os.X_OK))
        return ScriptSource(text, compile(text, path, "exec") if fits else None)
    except (OSError, ValueError, SyntaxError):
        return ScriptSource(b"", None)


class ImageScripts:
    def __init__(self, zero: Path, cache: FileCache) -> None:
        self._zero = zero
        self._cache = cache

    def step(self, tree: Path, script: str) -> CompiledScript | None:
        """Return the compiled script, "epilog.d/10-clean-up" for example; None if it must be started as a program."""
        code, library = self._same(tree, script), self._same(tree, LIBRARY)
        if code is None or library is None:
            return None
        return CompiledScript(f"{tree}/{script}", code, library, f"{tree}/lib")

    def _same(self, tree: Path, name: str) -> CodeType | None:
        paths = f"{tree}/{name}", f"{self._zero}/{name}"
        published, shipped = (self._cache.get(("source", path), [path], partial(read_source, path)) for path in paths)
        return published.code if published.text == shipped.text else None


class Stopped(BaseException):
    """The run is given up. Not SystemExit: a script ends itself with that."""


class _ScriptTooLong(BaseException):
    pass


# True while every step in this process ran to its end. A step that was cut may have left anything open.
_whole = True


def is_whole() -> bool:
    return _whole


def run_compiled(step: CompiledScript, env: Mapping[str, str], deadline_s: float, unfit: int) -> ScriptOutcome:
    """Run a step in this process, a fork made for runs: another fork would cost more than the step does.

    The changes that a step makes to the process are undone: other steps and runs follow.
    """
    global _whole  # noqa: PLW0603  # one process, one run at a time
    start = time.monotonic()
    output, saved = os.memfd_create("step"), [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (1, 2)]
    environ, path, mask, code, broken = os.environ, sys.path[:], os.umask(0o022), 1, ""
    for fd in (1, 2):
        os.dup2(output, fd)
    # Programs that a step starts inherit this environment; the runner's own is not the step's.
    os.environ = dict(env)  # type: ignore[assignment]  # noqa: B003  # no putenv: only this object
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        code = _execute(step)
        broken = why_broken(code, unfit)
    except _ScriptTooLong:
        broken = f"did not end within {deadline_s:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.environ = environ  # noqa: B003  # the original object
        sys.path[:] = path
        os.umask(mask)
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
    text = os.pread(output, OUTPUT_LIMIT, max(0, os.fstat(output).st_size - OUTPUT_LIMIT)).decode(errors="replace")
    os.close(output)
    _whole = _whole and not broken
    return ScriptOutcome(code, time.monotonic() - start, "", text, broken)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise _ScriptTooLong


def _execute(step: CompiledScript) -> int:
    """Run the script and return its exit code, by Python's rules for how a script ends."""
    code: object = 0
    try:
        sys.argv = [step.path]
        library, script = ModuleType("jobs"), ModuleType("__main__")
        library.__file__, script.__file__ = f"{step.lib}/jobs.py", step.path
        sys.modules.update({"jobs": library, "__main__": script})
        exec(step.library, library.__dict__)  # code that the image ships, nothing else
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


@dataclass(frozen=True, slots=True)
class Warm:
    """State that the resident runner prepares for a run; a run by itself has the defaults."""

    places: Places = field(default_factory=Places.from_environment)
    cache: FileCache | None = None
    image_scripts: ImageScripts | None = None
    # The commit, resolved and held for this run.
    held: Lease | None = None
    # A job has ended since the last check of the node.
    after_a_job: bool = False
    # The runner checks the node after this epilog, once for all ended jobs, so the epilog need not wait.
    looked_at_later: bool = False


def read_policy(tree: Path, places: Places, cache: FileCache | None) -> RunnerPolicy:
    """Return the runner's policy of a tree and the operator, from the cache unless a file has changed."""
    files = [places.policy, tree / IN_A_TREE]
    return (cache or FileCache()).get(("policy", tree), files, lambda: read_runner_policy(tree, places.policy))
