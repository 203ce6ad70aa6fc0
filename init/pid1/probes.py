"""Readiness probes: each ends with its first success. The kernel or a short child waits, never PID 1.

Loaded with the first probe, because inotify needs ctypes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import time

from init.engine.states import Phase, ProbeFailed, ProbePassed
from init.errors import describe_error
from init.fields import expand, number
from init.pid1.logs import Ring
from init.pid1.spawn.procs import with_files
from init.pid1.wait import IN, Scope, shut
from init.plan.service import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from init.pid1.children import Children
    from init.pid1.core import Core
    from init.pid1.wait import Poller, Timer
    from init.plan.service import Ready

    Heard = Callable[[ProbeFailed | ProbePassed], None]
    Start = Callable[[tuple[str, ...], int, Callable[[str], None]], int]
    StartOwn = Callable[[Callable[[], None], int], int]

_FIELDS = "\t"  # between the two fields of a line of a tcp probe's child
FIRST_RETRY = 0.005  # between bind() and listen() of a new socket


class PathProbe:
    """A file that exists, or a unix socket that accepts. Without inotify it is checked every `interval`."""

    def __init__(self, poller: Scope, inotify: Callable[[], Inotify], ready: Ready, target: str, heard: Heard) -> None:
        self._poller, self._inotify = poller, inotify
        self._ready, self._target, self._heard = ready, target, heard
        self._watch: PathWatch | None = None
        self._timer: Timer | None = None
        self._delay = FIRST_RETRY
        self._blind = ""  # why it cannot be watched: all pods of a host share its inotify instances

    def begin(self) -> None:
        if not self._try():
            try:
                attempt = self._poller.attempt
                self._watch = PathWatch(self._inotify(), self._target, lambda: attempt(self._try_anew), attempt)
            except OSError as error:
                self._blind = f"checked every {self._ready.interval:g} s; no inotify: {describe_error(error)}"
            self._try_anew()  # it may have appeared before the watch

    def _try_anew(self) -> None:
        self._delay = FIRST_RETRY
        self._try()

    def _try(self) -> bool:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        problem = ""
        if not self._exists():
            problem = f"{self._ready.probe.value} {self._target} missing"
            if self._blind:
                self._timer = self._poller.after(self._ready.interval, self._try_again)
        elif self._ready.probe is Probe.SOCKET:
            problem = self._connect()
            if problem:
                self._timer = self._poller.after(self._delay, self._try_again)
                self._delay = min(self._delay * 2, self._ready.interval)
        if not problem:
            self.close()
        self._heard(ProbeFailed(problem, self._blind) if problem else ProbePassed())
        return not problem

    def _try_again(self) -> None:
        self._try()

    def _exists(self) -> bool:
        """Check for existence; `os.path.lexists` would take any error for absence."""
        try:
            os.lstat(self._target)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _connect(self) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as stream:
            try:
                stream.connect(self._target)
            except BlockingIOError:
                return ""  # its backlog is full, so it listens
            except OSError as error:
                if error.errno == 91:  # EPROTOTYPE: it is a datagram socket, which cannot accept
                    return ""
                return f"socket {self._target}: {(error.strerror or '').lower()}"
        return ""

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()


class ExecProbe:
    """A command that exits 0; its last line is the reason until then."""

    def __init__(self, poller: Scope, ready: Ready, heard: Heard, start: Start, kill: Callable[[int], None]) -> None:
        self._poller, self._ready, self._heard, self._start, self._kill = poller, ready, heard, start, kill
        self._pid = 0
        self._pipe = -1
        self._ring = Ring()
        self._timer: Timer | None = None
        self._overdue: Timer | None = None
        self._closed = False

    def begin(self) -> None:
        self._run()

    def _run(self) -> None:
        self._ring = Ring()
        self._pipe, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(write, True)
            self._poller.add(self._pipe, IN, self._readable)
            self._pid = self._start(self._ready.command, write, lambda how: self._poller.attempt(self._handle_end, how))
        finally:
            shut(write)
        self._overdue = self._poller.after(self._ready.timeout, self._too_long)

    def _readable(self, _: int) -> None:
        try:
            chunk = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        if chunk:
            self._ring.add(chunk)
        else:
            self._poller.remove(self._pipe)

    def _too_long(self) -> None:
        self._ring.add(f"no answer within {self._ready.timeout:g} s\n".encode())
        self._kill(self._pid)

    def _handle_end(self, text: str) -> None:
        self._pid = 0
        if self._overdue is not None:
            self._overdue.cancel()
        if self._pipe >= 0:
            self._readable(0)
            self._hang_up()
        if self._closed:
            return
        if text == "exited 0":
            self._heard(ProbePassed())
            return
        last = self._ring.last()
        self._heard(ProbeFailed(f"{self._ready.command[0]} {text}", quoted=last, detail="" if last else "no output"))
        self._timer = self._poller.after(self._ready.interval, self._run)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pid:
            self._kill(self._pid)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._pipe >= 0:
            self._poller.remove(self._pipe)
            shut(self._pipe)
            self._pipe = -1


class TcpProbe:
    """A port that accepts, or answers well.

    A short child asks, since name look-ups may hang; it reports over a pipe.
    """

    def __init__(
        self, poller: Scope, ready: Ready, target: str, heard: Heard, start: StartOwn, kill: Callable[[int], None]
    ) -> None:
        self._poller, self._ready, self._target, self._heard = poller, ready, target, heard
        self._start, self._kill = start, kill
        self._pipe = -1
        self._pid = 0
        self._carry = b""
        self._timer: Timer | None = None

    def begin(self) -> None:
        self._pipe, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(write, True)
            self._poller.add(self._pipe, IN, self._readable)
            ready, target = self._ready, self._target
            self._pid = self._start(lambda: ask_port(ready.probe, target, ready.interval, ready.timeout), write)
        finally:
            shut(write)

    def _readable(self, _: int) -> None:
        try:
            chunk = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        if not chunk:  # the child was killed without an answer
            self.close()
            self._timer = self._poller.after(self._ready.interval, self.begin)
            return
        lines = (self._carry + chunk).split(b"\n")
        self._carry = lines.pop()
        if lines:
            text, _tab, detail = lines[-1].decode().partition(_FIELDS)
            if not text:
                self.close()
            self._heard(ProbeFailed(text, detail) if text else ProbePassed())

    def close(self) -> None:
        if self._pipe >= 0:
            self._poller.remove(self._pipe)
            shut(self._pipe)
            self._pipe = -1
            self._kill(self._pid)
            self._pid = 0
        if self._timer is not None:
            self._timer.cancel()


def ask_port(probe: Probe, target: str, interval: float, timeout: float) -> None:
    """Write each new answer as a line, in the child; an empty line means ready."""
    address, slash, path = target.partition("/") if probe is Probe.HTTP else (target, "", "")
    host, _, port = address.rpartition(":")
    previous = ""
    pause = min(interval, 0.05)
    while True:
        try:
            resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(item[4][0]) for item in resolved))
            problem = _connect_any(resolved, timeout, f"{slash}{path}")
            text = f"{probe.value} {target} {problem}{_FIELDS}resolves to {', '.join(addresses[:4])}" if problem else ""
        except socket.gaierror as error:
            text = f"{probe.value} {target}: the name does not resolve{_FIELDS}{(error.strerror or '').lower()}"
        except ValueError:
            text = f"{probe.value} {target}: {port!r} is not a port"
        if text != previous or not text:
            os.write(1, f"{text}\n".encode())
            previous = text
        if not text:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, max(interval, 1.0))


def _connect_any(resolved: Sequence[tuple[int, int, int, str, Any]], timeout: float, path: str) -> str:
    problem = ""
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as stream:
            stream.settimeout(timeout)
            try:
                stream.connect(address)
            except TimeoutError:
                problem = "does not answer"
            except OSError as error:
                problem = "refused" if error.errno == 111 else (error.strerror or str(error)).lower()
            else:
                if not path or not (problem := _get(stream, path)):
                    return ""
    return problem or "has no address"


def _get(stream: socket.socket, path: str) -> str:
    """Return the error in the HTTP answer.

    A server that closes without an answer speaks no HTTP, as Slurm's daemons do where a site disabled it: accepting is
    enough then.
    """
    line, until = b"", time.monotonic() + (stream.gettimeout() or 0.0)
    try:
        stream.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        while b"\n" not in line and len(line) < 1024 and (piece := stream.recv(1024)):
            line += piece
            stream.settimeout(max(until - time.monotonic(), 0.01))
    except TimeoutError:
        return "accepts and does not answer"
    except OSError as error:
        return "" if error.errno in (32, 104) else (error.strerror or str(error)).lower()
    words = line.partition(b"\n")[0].split()
    code = number(words[1].decode(errors="replace")) if words[1:] and words[0].startswith(b"HTTP/") else None
    if code is None or not 100 <= code <= 999:
        return "does not answer in HTTP" if line else ""
    # Only the number: the server may write any text.
    return "" if code // 100 == 2 else f"answers {code}"


class RunningProbes:
    """The running probes. A probe that fails reports the reason in its service's name and starts again."""

    def __init__(self, core: Core, children: Children) -> None:
        self._core, self._children = core, children
        self._probes: dict[str, PathProbe | ExecProbe | TcpProbe] = {}
        self._scopes: dict[str, Scope] = {}
        self._again: dict[str, Timer] = {}
        self._inotify: Inotify | None = None

    def begin(self, name: str) -> None:
        self.end(name)
        scope = Scope(self._core.poller, lambda reason: self._handle_failure(name, scope, reason))
        self._scopes[name] = scope
        scope.attempt(self._begin, name, scope)

    def _begin(self, name: str, scope: Scope) -> None:
        core, ready = self._core, self._core.engine.spec(name).ready

        def handle_event(event: ProbeFailed | ProbePassed) -> None:
            if isinstance(event, ProbePassed):
                self._probes.pop(name, None)
                self._scopes.pop(name, None)
            core.handle(name, event)

        try:
            # A prepare command may have written the address: the controller's with its port, for example.
            target = expand(ready.target, with_files(core.engine.spec(name), core.settings.env))
        except KeyError as missing:
            core.handle(name, ProbeFailed(f"${{{missing.args[0]}}} is not set"))
            return
        probe: PathProbe | ExecProbe | TcpProbe
        if ready.probe is Probe.EXEC:
            probe = ExecProbe(
                scope,
                ready,
                handle_event,
                lambda command, output, ended: self._children.run_helper(name, command, output, ended),
                self._children.kill_helper,
            )
        elif ready.probe in (Probe.TCP, Probe.HTTP):
            probe = TcpProbe(scope, ready, target, handle_event, self._children.run_own, self._children.kill_helper)
        else:
            probe = PathProbe(scope, self._share_inotify, ready, target, handle_event)
        self._probes[name] = probe
        probe.begin()

    def _share_inotify(self) -> Inotify:
        if self._inotify is None:
            self._inotify = Inotify(self._core.poller)
        return self._inotify

    def _handle_failure(self, name: str, scope: Scope, reason: str) -> None:
        core, state = self._core, self._core.engine.states.get(name)
        if self._scopes.get(name, scope) is not scope or state is None or state.phase is not Phase.STARTING:
            core.report_trouble(f"a probe of {name} that is over: {reason}")
            return
        self.end(name)
        core.handle(name, ProbeFailed(f"cannot probe its readiness: {reason}"))
        interval = core.engine.spec(name).ready.interval
        self._again[name] = core.poller.after(interval, lambda: self.begin(name))

    def end(self, name: str) -> None:
        scope, probe, again = self._scopes.pop(name, None), self._probes.pop(name, None), self._again.pop(name, None)
        if again is not None:
            again.cancel()
        if probe is not None and scope is not None:
            scope.attempt(probe.close)


# Waiting for a path without polling, by inotify.

CREATED, MOVED_IN, ATTRIBUTES, DELETED_SELF, MOVED_SELF = 0x100, 0x80, 0x4, 0x400, 0x800
OVERFLOW = -1  # the watch in an event that reports dropped events
MOST_LOOKS = 16
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name


class Inotify:
    """One instance for PID 1's whole life: closing one costs 15 ms, in which the kernel waits for its readers."""

    def __init__(self, poller: Poller) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error()
        self._watchers: dict[int, list[PathWatch]] = {}
        try:
            poller.add(self._fd, IN, self._readable)
        except OSError:
            shut(self._fd)
            raise

    def aim(self, watcher: PathWatch, directory: str) -> int:
        mask = CREATED | MOVED_IN | ATTRIBUTES | DELETED_SELF | MOVED_SELF
        watch: int = self._libc.inotify_add_watch(self._fd, directory.encode(), mask)
        if watch < 0:
            raise _error()
        self._watchers.setdefault(watch, []).append(watcher)
        return watch

    def drop(self, watcher: PathWatch, watch: int) -> None:
        watchers = self._watchers.get(watch, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers and self._watchers.pop(watch, None) is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    def _readable(self, _: int) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        watches: dict[int, None] = {}
        at = 0
        while at < len(data):
            watch, _mask, _cookie, length = _EVENT.unpack_from(data, at)
            watches[watch] = None
            at += _EVENT.size + length
        lost = OVERFLOW in watches  # events were dropped: every watcher has to look
        for watch in list(self._watchers) if lost else watches:
            for watcher in list(self._watchers.get(watch, ())):
                watcher.attempt(watcher.look_and_aim)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _is_directory(path: str) -> bool:
    """Test for a directory; `os.path.isdir` would take any error for a no."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116 - no pathlib on PID 1's path
    except (FileNotFoundError, NotADirectoryError):
        return False


class PathWatch:
    """Call back whenever something appears in the nearest existing directory above a path."""

    def __init__(
        self, inotify: Inotify, path: str, appeared: Callable[[], None], attempt: Callable[[Callable[[], None]], None]
    ) -> None:
        self._inotify, self._path, self._appeared = inotify, path, appeared
        self.attempt = attempt  # from the owner, so that one watcher's error does not affect the next
        self._watch = -1
        self._aim()

    def _aim(self) -> None:
        """Watch the deepest existing directory above the path.

        Between a look and its watch that directory may change without an event: look again, a bounded number of times,
        since a process may create and remove directories without end.
        """
        directory = self._nearest()
        for looks_left in range(MOST_LOOKS - 1, -1, -1):
            try:
                before, self._watch = self._watch, self._inotify.aim(self, directory)
            except (FileNotFoundError, NotADirectoryError):
                if not looks_left and self._watch < 0:
                    raise
                directory = self._nearest()
                continue
            if before >= 0:  # after the new one: the same directory has the same watch, which must stay
                self._inotify.drop(self, before)
            aimed, directory = directory, self._nearest()
            if directory == aimed:
                return

    def _nearest(self) -> str:
        directory = os.path.dirname(self._path)  # noqa: PTH120 - no pathlib on PID 1's path
        while directory not in ("", "/") and not _is_directory(directory):
            directory = os.path.dirname(directory)  # noqa: PTH120 - as above
        return directory or "/"

    def look_and_aim(self) -> None:
        """Look for the path, then watch the directory that is now the nearest above it.

        Look first: a path that exists ends the probe, and with it the watch.
        """
        self._appeared()
        if self._watch >= 0:
            self._aim()
            self._appeared()  # it may have appeared before the new watch

    def close(self) -> None:
        if self._watch >= 0:
            self._inotify.drop(self, self._watch)
            self._watch = -1
