"""The pod's log from the services' output: each line once, whole, tagged. A slow reader slows services, never PID 1."""

from __future__ import annotations

import fcntl
import os
import select
import time

from init.pid1.wait import IN, OUT, shut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.wait import Poller, Timer

LONGEST = 256 * 1024  # longer lines are passed on in parts
CONTINUES = b" [continues]\n"
KEPT = 256 * 1024
READ = 1 << 18
PIPE = 1 << 20
HIGH = 1 << 20  # stop reading at this many unwritten bytes
LOW = 1 << 18
MOST = 4 * HIGH  # limit for lines of PID 1, which cannot be paused; beyond it they are counted and dropped
IOV = 64
OWN = "init"
RETRY = 1.0  # pause after an output error (a full disk)
GONE = (32, 9)  # EPIPE, EBADF; init.pid1.spawn.procs tells why by number


# Blocks of log lines: cut at line ends, tagged, kept. Works on whole blocks, since lines are too many.


def cut(carry: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Return the complete lines, and the rest for the next call."""
    end = chunk.rfind(b"\n") + 1
    if not end:
        carry += chunk
        if len(carry) <= LONGEST:
            return b"", carry
        parts = [carry[at : at + LONGEST] for at in range(0, len(carry), LONGEST)]
        return b"".join(part + CONTINUES for part in parts[:-1]), parts[-1]
    block = carry + chunk[:end] if carry else chunk[:end] if end < len(chunk) else chunk
    return block, chunk[end:]


def tag_text(block: bytes, name: bytes) -> bytes:
    """Tag lines as `name | line`. The container runtime adds the time."""
    prefix = name + b" | "
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def tag_json(block: bytes, name: str, stream: str, time: str) -> bytes:
    from json import dumps

    head = f'{{"time": "{time}", "service": "{name}", "stream": "{stream}", "line": '
    lines = block[:-1].decode(errors="backslashreplace").split("\n")
    return "".join(f"{head}{dumps(line)}}}\n" for line in lines).encode()


class Ring:
    """The newest lines of a service. Keeps references to whole blocks, which costs nothing."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size = 0

    def add(self, block: bytes) -> None:
        block = block if len(block) <= KEPT else block[block.find(b"\n", len(block) - KEPT - 1) + 1 :] or block[-KEPT:]
        self._blocks.append(block)
        self._size += len(block)
        while self._size - len(self._blocks[0]) >= KEPT:
            self._size -= len(self._blocks.pop(0))

    def tail(self, lines: int) -> list[str]:
        kept = b"".join(self._blocks).decode(errors="backslashreplace").split("\n")[:-1]
        return kept[-lines:] if lines > 0 else []

    def last(self) -> str:
        """Return the last nonempty line, short enough to be a reason."""
        for block in reversed(self._blocks):
            text = block[-2048:].decode(errors="backslashreplace").rstrip()
            if text:
                return text[text.rfind("\n") + 1 :].strip()[-400:]
        return ""


class LogSource:
    """One stream of one service: a pipe that lives as long as the service is known."""

    __slots__ = ("carry", "fd", "mode", "name", "stream", "write_fd")

    def __init__(self, name: str, stream: str, mode: str) -> None:
        self.name, self.stream, self.mode = name, stream, mode
        self.carry = b""
        self.fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self.fd, False)
        except OSError:
            self.close()
            raise
        _enlarge(self.fd)

    def close(self) -> None:
        shut(self.fd)
        shut(self.write_fd)


class Logs:
    def __init__(
        self, poller: Poller, output: int, *, as_json: bool, troubled: Callable[[str], None] = lambda _: None
    ) -> None:
        self._poller = poller
        self._as_json = as_json
        self._troubled = troubled
        self._sources: dict[str, tuple[LogSource, LogSource]] = {}
        self._reading = True
        self._pausing: list[Callable[[bool], None]] = []  # other sources than the services' pipes
        self._pending: list[bytes] = []
        self._size = 0
        self._waiting = False  # for room in the output
        self._retry: Timer | None = None
        self.rings: dict[str, Ring] = {OWN: Ring()}
        self.followers: dict[str, list[Callable[[bytes], None]]] = {}
        self.written = 0
        self.lost = 0  # bytes lost to a full disk, a closed reader, or (own lines) a stuck one; reported afterwards
        self.lost_ever = 0
        self.trouble = ""
        self._gone = False
        self._fd = reopen_output(output)
        _enlarge(self._fd)

    # Input.

    def streams(self, name: str, mode: str) -> tuple[int, int]:
        """Return the write ends for a service's stdout and stderr."""
        if name not in self._sources:
            self._sources[name] = self._both(name, mode)
            self.rings.setdefault(name, Ring())
        for source in self._sources[name]:
            source.mode = mode
        return self._sources[name][0].write_fd, self._sources[name][1].write_fd

    def _both(self, name: str, mode: str) -> tuple[LogSource, LogSource]:
        """Create both streams or none: a stream without a reader would block its service one day."""
        sources: list[LogSource] = []
        try:
            for stream in ("stdout", "stderr"):
                source = LogSource(name, stream, mode)
                sources.append(source)
                self._poller.add(source.fd, IN if self._reading else 0, self._reader(source))
        except OSError:
            for source in sources:
                self._poller.remove(source.fd)
                source.close()
            raise
        return sources[0], sources[1]

    @property
    def full(self) -> bool:
        """True while no more should be read because too much is unwritten."""
        return self._size >= HIGH and not self.trouble

    def pause_too(self, pause: Callable[[bool], None]) -> None:
        """Add a source that is paused together with the services' pipes."""
        self._pausing.append(pause)
        if not self._reading:
            pause(True)

    def forget(self, name: str) -> None:
        """Forget a service that a new plan removed."""
        self.finish(name)
        for source in self._sources.pop(name, ()):
            self._poller.remove(source.fd)
            source.close()
        self.rings.pop(name, None)

    def log(self, text: str, *, aloud: bool = True) -> None:
        """Log a line of PID 1; with `aloud` false it is kept for requests, and not written to the pod's log."""
        line = text.encode(errors="backslashreplace").rstrip(b"\n") + b"\n"
        self.take(OWN, "stderr", "tagged" if aloud else "off", line)

    def take(self, name: str, stream: str, mode: str, block: bytes) -> None:
        """Take complete lines of a service from any source."""
        ring = self.rings.get(name)
        if ring is None:
            ring = self.rings[name] = Ring()
        ring.add(block)
        for follower in self.followers.get(name, ()):
            follower(block)
        if mode == "off" or self._gone:
            return
        if mode == "tagged":
            block = tag_json(block, name, stream, _stamp()) if self._as_json else tag_text(block, name.encode())
        if (self.trouble and self._size > HIGH) or (name == OWN and self._size > MOST):
            self._lose(len(block))
            return
        self._pending.append(block)
        self._size += len(block)

    def finish(self, name: str) -> str:
        """Read what an ended process left, including an unfinished line; return its last line."""
        for source in self._sources.get(name, ()):
            # Bounded: other processes may keep writing, and a stalled reader must not make PID 1 keep a crash loop's
            # output.
            budget = 2 * PIPE if self._size < 4 * HIGH else 0
            while budget > 0 and (count := self._read(source)):
                budget -= count
            if source.carry:
                carry, source.carry = source.carry, b""
                self.take(name, source.stream, source.mode, carry + b"\n")
        self.flush()
        ring = self.rings.get(name)
        return ring.last() if ring else ""

    def _reader(self, source: LogSource) -> Callable[[int], None]:
        def readable(_: int) -> None:
            self._read(source)
            self.flush()

        return readable

    def _read(self, source: LogSource) -> int:
        try:
            chunk = os.read(source.fd, READ)
        except BlockingIOError:
            return 0
        block, source.carry = cut(source.carry, chunk)
        if block:
            self.take(source.name, source.stream, source.mode, block)
        return len(chunk)

    # Output.

    def flush(self) -> None:
        while self._pending and not self._waiting and self._retry is None:
            try:
                count = os.writev(self._fd, self._pending[:IOV])
            except BlockingIOError:
                self._wait_for_room()
                break
            except OSError as error:
                self._in_trouble(error)
                break
            self._count_written(count)
        self._set_reading()

    def _count_written(self, count: int) -> None:
        self.written += count
        self._size -= count
        if self.trouble:
            lost, self.lost, self.trouble = self.lost, 0, ""
            self._troubled("")
            self.log(f"log output works again; {lost} bytes were lost")
        elif self.lost and self._size < LOW:
            lost, self.lost = self.lost, 0
            self.log(f"the log's reader was too slow; {lost} bytes of init's own lines were lost")
        whole = 0
        while count and count >= len(self._pending[whole]):
            count -= len(self._pending[whole])
            whole += 1
        del self._pending[:whole]
        if count:
            self._pending[0] = self._pending[0][count:]

    def _wait_for_room(self) -> None:
        try:
            self._poller.add(self._fd, OUT, self._writable)
            self._waiting = True
        except OSError:
            self._retry = self._poller.after(RETRY, self._again)

    def _writable(self, _: int) -> None:
        self._poller.remove(self._fd)
        self._waiting = False
        self.flush()

    def _in_trouble(self, error: OSError) -> None:
        """Handle an output error. A full disk is temporary: keep what fits and drop the rest, so that no service hangs.

        A closed reader is permanent.
        """
        self.trouble = f"{error.strerror}; lines are dropped"
        self._troubled(self.trouble)
        if error.errno in GONE:
            self._gone = True
            self._lose(self._size)
            self._pending.clear()
            self._size = 0
            return
        self._retry = self._poller.after(RETRY, self._again)

    def _lose(self, count: int) -> None:
        self.lost += count
        self.lost_ever += count

    def _again(self) -> None:
        self._retry = None
        self.flush()

    def _set_reading(self) -> None:
        should_read = self._size < (LOW if not self._reading else HIGH) or bool(self.trouble)
        if should_read is self._reading:
            return
        self._reading = should_read
        for pair in self._sources.values():
            for source in pair:
                self._poller.change(source.fd, IN if should_read else 0)
        for pause in self._pausing:
            pause(not should_read)

    def close(self, seconds: float) -> None:
        """Read everything at the very end, and give the reader this long to take it."""
        for name in list(self._sources):
            try:
                self.finish(name)
            except OSError:
                continue  # continue with the other services' last lines
        deadline = time.monotonic() + seconds
        while self._pending and not self._gone:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            try:
                self._count_written(os.writev(self._fd, [self._pending[0]]))
            except BlockingIOError:
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll(remaining * 1000)
            except OSError:
                break


def _stamp() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e6) % 1000000:06d}Z"


def reopen_output(fd: int) -> int:
    """Return PID 1's output, non-blocking for PID 1 alone: a pipe or terminal is opened anew."""
    import stat

    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            pass  # a terminal of another mount namespace: share it
    os.set_blocking(fd, False)
    return fd


def _enlarge(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE)
    except OSError:
        return  # not a pipe, or above the user's limit: it works unchanged
