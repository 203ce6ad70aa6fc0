"""Run git and the checks as short-lived children, each in a process group with a deadline and a clean environment.

A flock allows one cycle at a time on a root. Children that write inherit it, and every child carries its cycle's mark.
So the lock is free only when the last child has ended, and its holder may clean up after any killed cycle.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import GitsyncError, Stalled
from ground.files import locked

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Bytes of a child's stderr that are kept.
OUTPUT_TAIL = 4000
# Environment variable that names the cycle of a child. Set while a cycle holds its lock.
MARK = "MINIVM_GITSYNC_CYCLE"
# Variables that children inherit: of the pod's environment, a transfer needs proxies and certificates only.
PASSED_ON = (MARK, "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
             "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    status: int
    out: bytes
    err: str


def make_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build a child's environment: no git configuration but the repository's, no prompt, messages in English."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    env |= {
        "PATH": PATH,
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",
        "GIT_ADVICE": "0",
    }
    return env | dict(extra or {})


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    keep_open: Sequence[int] = (),
    largest_file: int | None = None,
    stdin: bytes = b"",
) -> Done:
    """Run a child to its end or deadline; afterwards its whole process group is gone.

    `env` adds to `make_environment`; `largest_file` bounds every file that the child writes.
    """
    words = [os.fspath(word) for word in argv]
    try:
        with _limit_file_size(largest_file):
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=make_environment(env),
                cwd=cwd,
                process_group=0,
                pass_fds=tuple(keep_open),
            )
    except OSError as error:
        raise GitsyncError(f"run {words[0]}", error.strerror or str(error)) from None
    try:
        out, err = child.communicate(stdin or None, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Stalled(f"run {' '.join(words[:3])}", f"it did not end within {timeout:g} s") from None
    finally:
        end_group(child)
    return Done(child.returncode, out, err[-OUTPUT_TAIL:].decode(errors="replace").strip())


@contextlib.contextmanager
def _limit_file_size(largest: int | None) -> Iterator[None]:
    """Bound the files of a child that starts inside: a repository that is too large cannot fill the disk unnoticed.

    The child inherits the limit. It is set in this process for a moment, because code between fork and exec would copy
    this process for every child.
    """
    if largest is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group: a process that it left behind would hold the lock."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()


POLL = 0.05


@dataclass(frozen=True, slots=True)
class HeldLock:
    """The taken lock, as a descriptor for children that write to inherit."""

    fd: int


def _read_start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot. With it, a reused pid is recognised."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _is_alive(cycle: str) -> bool:
    pid, _, started = cycle.partition(":")
    try:
        return _read_start_time(int(pid)) == started
    except (OSError, ValueError):
        return False


def end_children_of(cycle: str) -> None:
    """Kill the children of a dead cycle: the processes that carry its mark, and no other that waits for the lock."""
    if not cycle:
        return
    mark = f"{MARK}={cycle}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def hold_lock(path: Path, wait: float) -> Iterator[HeldLock]:
    """Hold the lock. Wait at most `wait` seconds for a live owner; kill a dead owner's children at once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait
        while not locked(fd):
            end_children_of(_dead_owner(fd))
            if time.monotonic() > deadline:
                raise GitsyncError("start a cycle", "another gitsync is running", file=path, hint="try again")
            time.sleep(POLL)
        # A cycle that ends removes its name. A name that is still there belongs to a killed cycle.
        end_children_of(_dead_owner(fd))
        cycle = f"{os.getpid()}:{_read_start_time(os.getpid())}"
        # One write of a fixed length: a waiter reads the old name or the new one, never a mix.
        os.pwrite(fd, f"{cycle:<63}\n".encode(), 0)
        os.environ[MARK] = cycle
        yield HeldLock(fd)
        os.pwrite(fd, f"{'':<63}\n".encode(), 0)
    finally:
        os.environ.pop(MARK, None)
        os.close(fd)


def _dead_owner(fd: int) -> str:
    owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
    return "" if _is_alive(owner) else owner
