"""Read the sources of checks on a live node: programs in parallel, each with a deadline; none can hang the round.

A program that does not end is killed with its group. One in uninterruptible sleep cannot be killed: it is left behind,
and the next run does not start another.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ground.files import write_whole
from health.api import Builtin, Capture, Command, Failure, Files, Source
from health.checks.builtin import BUILTINS, is_there, measure_delay, read_start

LIMIT = 2 * 1024 * 1024
AT_ONCE = 8
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin:/usr/local/nvidia/bin"
# UTC: Slurm prints local times without a zone.
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C", "HOME": "/", "TERM": "dumb", "TZ": "UTC"}
HEADER = "==> {} <=="


@dataclass(slots=True)
class _Running:
    source: str
    label: str
    command: Command
    process: subprocess.Popen[bytes]
    deadline: float
    output: bytearray = field(default_factory=bytearray)


def collect(
    sources: Iterable[Source],
    environment: Mapping[str, str] | None = None,
    abandoned: Path | None = None,
    *,
    at_once: int = AT_ONCE,
    grace_s: float = 0.0,
) -> dict[str, Capture]:
    """Read every source, by name.

    `abandoned` records, over runs, the programs that could not be killed. `at_once` is the number of parallel programs.
    Where the round is cut, its programs get SIGTERM, and after `grace_s` SIGKILL.
    """
    by_name = {source.name: source for source in sources}
    readings: dict[str, Capture] = {}
    commands: list[tuple[str, str, Command, tuple[str, ...]]] = []
    parts: dict[str, list[tuple[str, Capture]]] = {}
    env = {**ENVIRONMENT, **(environment or {})}
    for name, source in by_name.items():
        if isinstance(source, Command):
            program = shutil.which(source.argv[0], path=env["PATH"])
            if program is None:
                readings[name] = Capture("", Failure.MISSING, f"{source.argv[0]} is not installed")
                continue
            targets = list_matching(source.each) if source.each else [""]
            if not targets:
                readings[name] = Capture("", Failure.MISSING, f"nothing matches {source.each}")
            for target in targets:
                commands.append((name, target, source, (program, *source.argv[1:], *([target] if target else []))))
    stuck = _read_stuck(abandoned)
    for name, label, capture in _run_all(commands, env, stuck, at_once, grace_s):
        parts.setdefault(name, []).append((label, capture))
    _remember(abandoned, stuck)
    for name, captured in parts.items():
        readings[name] = _join(captured)
    for name, source in by_name.items():
        if isinstance(source, Files):
            readings[name] = read_files(source)
        elif isinstance(source, Builtin):
            readings[name] = (
                BUILTINS[name]() if name in BUILTINS else Capture("", Failure.MISSING, f"no builtin {name}")
            )
    return readings


def read_files(source: Files) -> Capture:
    lines: list[str] = []
    for pattern in source.patterns:
        for path in list_matching(pattern):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                text = os.read(fd, 65536).decode(errors="replace")
            except OSError:
                # A link that is down answers EINVAL for its speed: treat it as absent; the parser notices that.
                continue
            finally:
                os.close(fd)
            lines += [HEADER.format(path), text.rstrip("\n"), ""]
    if not lines:
        return Capture("", Failure.MISSING, f"nothing matches {' '.join(source.patterns)}")
    return Capture("\n".join(lines))


def list_matching(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path("/").glob(pattern.lstrip("/")))


def _join(captured: list[tuple[str, Capture]]) -> Capture:
    if len(captured) == 1 and not captured[0][0]:
        return captured[0][1]
    failed = [capture for _, capture in captured if capture.failure]
    if failed:
        return failed[0]
    return Capture("\n".join(f"{HEADER.format(label)}\n{capture.text}" for label, capture in sorted(captured)))


def _run_all(
    commands: list[tuple[str, str, Command, tuple[str, ...]]],
    env: Mapping[str, str],
    stuck: dict[str, int],
    at_once: int,
    grace_s: float,
) -> list[tuple[str, str, Capture]]:
    done: list[tuple[str, str, Capture]] = []
    waiting = list(reversed(commands))
    running: dict[int, _Running] = {}
    with selectors.DefaultSelector() as selector, _end_on_exit(running, grace_s):
        while waiting or running:
            while waiting and len(running) < at_once:
                name, label, command, argv = waiting.pop()
                if argv[0] in stuck:
                    reason = f"an earlier {argv[0]} (pid {stuck[argv[0]]}) still hangs in the kernel"
                    done.append((name, label, Capture("", Failure.TIMEOUT, reason)))
                    continue
                try:
                    process = subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        env=dict(env),
                        cwd="/",
                        start_new_session=True,
                    )
                except OSError as error:
                    done.append((name, label, Capture("", Failure.FAILED, f"{argv[0]}: {error.strerror}")))
                    continue
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                entry = _Running(name, label, command, process, time.monotonic() + command.deadline_s)
                running[process.stdout.fileno()] = entry
                selector.register(process.stdout, selectors.EVENT_READ)
            if not running:
                continue
            timeout = max(0.0, min(entry.deadline for entry in running.values()) - time.monotonic())
            for key, _ in selector.select(timeout):
                entry = running[key.fd]
                chunk = os.read(key.fd, 65536)
                entry.output += chunk[: LIMIT + 1 - len(entry.output)]
                if not chunk:
                    selector.unregister(key.fileobj)
                    done.append(_finish(entry, stuck))
                    del running[key.fd]
            for fd in [fd for fd, entry in running.items() if time.monotonic() >= entry.deadline]:
                selector.unregister(fd)
                done.append(_give_up(running[fd], stuck))
                del running[fd]
    return done


@contextlib.contextmanager
def _end_on_exit(running: Mapping[int, _Running], grace_s: float) -> Iterator[None]:
    """End the running programs on exit: a round may be cut before their deadlines, and each has its own session."""
    try:
        yield
    finally:
        groups = [entry.process.pid for entry in running.values() if entry.process.returncode is None]
        if grace_s and groups:
            _terminate(groups, grace_s)
        for group in groups:
            _kill(group)


def _terminate(groups: Iterable[int], grace_s: float) -> None:
    """Let the children of these groups end, also adopted ones."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    until = time.monotonic() + grace_s
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGTERM)
    for group in groups:
        with contextlib.suppress(ChildProcessError):
            while (remaining := until - time.monotonic()) > 0:
                if not os.waitpid(-group, os.WNOHANG)[0]:
                    signal.sigtimedwait({signal.SIGCHLD}, remaining)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _finish(entry: _Running, stuck: dict[str, int]) -> tuple[str, str, Capture]:
    try:
        code = entry.process.wait(max(0.05, entry.deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _give_up(entry, stuck)
    assert entry.process.stdout is not None
    entry.process.stdout.close()
    text = entry.output[:LIMIT].decode(errors="replace")
    capture = Capture(text, code=code)
    if len(entry.output) > LIMIT:
        capture = Capture(text, Failure.TRUNCATED, f"{entry.command.argv[0]} printed more than {LIMIT} bytes", code)
    elif entry.command.accept and code not in entry.command.accept:
        last = text.strip().splitlines()[-1][:200] if text.strip() else "no output"
        capture = Capture(text, Failure.FAILED, f"{entry.command.argv[0]} exited {code}: {last}", code)
    return entry.source, entry.label, capture


def _give_up(entry: _Running, stuck: dict[str, int]) -> tuple[str, str, Capture]:
    waited = measure_delay(entry.process.pid)
    _kill(entry.process.pid)
    try:
        entry.process.wait(0.5)
    except subprocess.TimeoutExpired:
        stuck[str(entry.process.args[0])] = entry.process.pid  # type: ignore[index]  # argv is a tuple here
        # Popen's destructor must not wait for the process nor warn about it.
        entry.process.returncode = -signal.SIGKILL
    assert entry.process.stdout is not None
    entry.process.stdout.close()
    reason = f"{' '.join(entry.command.argv)} did not answer within {entry.command.deadline_s:g} s"
    failure = Failure.TIMEOUT
    if waited > entry.command.deadline_s / 2:
        # Any job can cause this, and it says nothing about what the program measures.
        failure, reason = Failure.FAILED, f"{reason}, of which it waited {waited:.1f} s for a processor"
    return entry.source, entry.label, Capture(entry.output.decode(errors="replace"), failure, reason)


def _read_stuck(file: Path | None) -> dict[str, int]:
    """Read the programs of earlier runs that still exist.

    The lines are "PROGRAM PID START", so that a reused pid does not match.
    """
    programs: dict[str, int] = {}
    if file is None:
        return programs
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            program, pid, start = line.rsplit(" ", 2)
            if is_there(pid, start):
                programs[program] = int(pid)
    return programs


def _remember(file: Path | None, stuck: Mapping[str, int]) -> None:
    if file is None or (not stuck and not file.exists()):
        return
    lines = [f"{program} {pid} {start}\n" for program, pid in stuck.items() if (start := read_start(pid))]
    with contextlib.suppress(OSError):
        write_whole(file, "".join(lines).encode())
