"""Connections and lines of the control socket; `init.pid1.serve.requests` performs the requests."""

from __future__ import annotations

import os
import socket
import struct

from init.errors import ORDINARY, InitError, describe_error
from init.pid1.wait import IN, OUT, Scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.pid1.wait import Poller

    Request = dict[str, object]
    Handle = Callable[["Connection", Request], None]

LONGEST = 4 << 20  # room for a plan
MOST_UNREAD = 4 << 20  # a follower that does not read is disconnected
MOST_CONNECTIONS = 64


class Connection:
    """One client. Requests are answered in order; a stream (logs -f, watch) lasts until the connection ends."""

    def __init__(
        self, poller: Poller, stream: socket.socket, handle: Handle, closed: Callable[[Connection], None]
    ) -> None:
        self._poller = Scope(poller, lambda _: self.close())
        self._stream, self._handle, self._closed = stream, handle, closed
        self._received = b""
        self._left = b""
        self.waiting = False  # for a request to finish
        self.at_close: list[Callable[[], None]] = []
        stream.setblocking(False)
        poller.add(stream.fileno(), IN, self._ready)

    def reply(self, **fields: object) -> None:
        from json import dumps

        self._send(dumps({"ok": True} | fields).encode() + b"\n")

    def refuse(self, error: str, hint: str = "") -> None:
        from json import dumps

        self._send(dumps({"ok": False, "error": error, "hint": hint}).encode() + b"\n")

    def resume(self) -> None:
        """Continue with the next request after a delayed answer."""
        self.waiting = False
        self._requests()

    def _ready(self, mask: int) -> None:
        try:
            if self._left and mask & OUT:
                self._flush()
            if mask & ~OUT:
                chunk = self._stream.recv(1 << 16)
                if not chunk:
                    self.close()
                    return
                self._received += chunk
                if len(self._received) > LONGEST:
                    self.close()
                    return
                self._requests()
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _requests(self) -> None:
        from json import loads

        while not self.waiting and b"\n" in self._received and self._stream.fileno() >= 0:
            text, _, self._received = self._received.partition(b"\n")
            try:
                request = loads(text)
            except (ValueError, RecursionError) as error:
                nested = isinstance(error, RecursionError)
                self.refuse(f"cannot read the request: {'nested too deeply' if nested else 'not JSON'}")
                continue
            if not isinstance(request, dict):
                self.refuse("cannot read the request: not an object")
                continue
            summary = " ".join(str(request[key])[:64] for key in ("op", "service") if key in request)
            self.attempt(self._bind_request(request), summary)

    def _bind_request(self, request: Request) -> Callable[[], None]:
        return lambda: self._handle(self, request)

    def attempt(self, call: Callable[[], None], what: str = "answer") -> None:
        """Do something for this client; an error goes to this client alone."""
        try:
            call()
        except ORDINARY as error:
            self.waiting = False
            if isinstance(error, InitError):
                where = ": ".join(part for part in (error.file, error.field) if part)
                self.refuse(f"{where + ': ' if where else ''}cannot {error.what}: {error.why}", error.hint)
            else:
                self.refuse(f"cannot {what}: {describe_error(error)}")

    def _send(self, data: bytes) -> None:
        if self._stream.fileno() < 0:
            return
        self._left += data
        try:
            self._flush()
        except BlockingIOError:
            self._poller.change(self._stream.fileno(), IN | OUT)
        except OSError:
            self.close()
        if len(self._left) > MOST_UNREAD:
            self.close()

    def _flush(self) -> None:
        while self._left:
            self._left = self._left[self._stream.send(self._left) :]
        self._poller.change(self._stream.fileno(), IN)

    def close(self) -> None:
        if self._stream.fileno() < 0:
            return
        self._poller.remove(self._stream.fileno())
        hang_up(self._stream)
        self._closed(self)
        for call in self.at_close:
            call()


class Control:
    def __init__(self, path: str, poller: Poller, handle: Handle) -> None:
        self.path = path
        self._poller, self._handle = poller, handle
        self._connections: set[Connection] = set()
        fresh = f"{path}.new"
        if os.path.lexists(fresh):
            os.unlink(fresh)  # noqa: PTH108 - no pathlib on PID 1's path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)  # created with its final mode
        try:
            self._listener.bind(fresh)
        finally:
            os.umask(before)
        self._listener.listen(64)
        os.rename(fresh, path)  # noqa: PTH104 - visible only once it listens
        poller.add(self._listener.fileno(), IN, self._accept)

    def _accept(self, _: int) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return  # on any other error the client still waits, and the poller repeats this
            try:
                size = struct.calcsize("3i")
                uid = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
                if uid in (0, os.getuid()) and len(self._connections) < MOST_CONNECTIONS:
                    self._connections.add(Connection(self._poller, stream, self._handle, self._connections.discard))
                    continue
            except ORDINARY:
                pass  # the client sees a closed connection and connects again
            hang_up(stream)


def hang_up(stream: socket.socket) -> None:
    """Close a socket; after an error its number is free in the kernel and in Python too."""
    try:
        stream.close()
    except OSError:
        return


def text(request: Mapping[str, object], key: str, default: str | None = None) -> str:
    from init.errors import RequestError

    value = request.get(key, default)
    if not isinstance(value, str):
        raise RequestError(f"{request.get('op')}", f"{key} is missing or not text")
    return value
