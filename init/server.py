"""HTTP for probes and scrapes: GET, one answer, closed. Small on purpose; nothing here can block or grow."""

from __future__ import annotations

import socket
import time

from init.control import hang_up
from init.errors import ORDINARY, ConfigError
from init.fields import number
from init.poller import IN, OUT
from init.procs import SCARCE
from init.scope import Scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.poller import Poller, Timer

    # path -> status, content type, body
    Answer = Callable[[str], tuple[int, str, str]]

LONGEST_REQUEST = 8192
MOST_CONNECTIONS = 64
PATIENCE = 10.0  # seconds for a whole exchange
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    place = number(port)
    if place is None or place > 65535:
        raise ConfigError("serve HTTP", f"{address!r} is not host:port", field="MINIVM_HTTP")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), place))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in SCARCE:
            raise  # nothing is wrong with the address
        raise ConfigError("serve HTTP", f"{address}: {error.strerror or error}", field="MINIVM_HTTP") from None
    return listener


class Server:
    def __init__(self, poller: Poller, listener: socket.socket, answer: Answer) -> None:
        self._poller, self._listener, self._answer = poller, listener, answer
        self._open = 0
        poller.add(listener.fileno(), IN, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        found = self._listener.getsockname()
        return found[0], found[1]

    def _accept(self, _: int) -> None:
        for _ in range(32):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the caller hung up already
            if self._open < MOST_CONNECTIONS:
                try:
                    Exchange(self._poller, stream, self._answer, self._closed)
                    self._open += 1
                    continue
                except ORDINARY:
                    pass  # the caller sees a connection that was closed, and asks again
            hang_up(stream)

    def _closed(self) -> None:
        self._open -= 1

    def close(self) -> None:
        self._poller.remove(self._listener.fileno())
        self._listener.close()


class Exchange:
    """One request and its answer."""

    def __init__(self, poller: Poller, stream: socket.socket, answer: Answer, closed: Callable[[], None]) -> None:
        self._poller = Scope(poller, lambda _: self._close())
        self._stream, self._answer, self._closed = stream, answer, closed
        stream.setblocking(False)
        self._received = b""
        self._left = b""
        self._poller.add(stream.fileno(), IN, self._ready)
        self._timer: Timer = self._poller.after(PATIENCE, self._close)

    def _ready(self, _: int) -> None:
        try:
            if self._left:
                self._send()
                return
            chunk = self._stream.recv(LONGEST_REQUEST)
            self._received += chunk
            if not chunk:
                self._close()
            elif b"\r\n\r\n" in self._received or b"\n\n" in self._received:
                self._left = self._respond()
                self._send()
            elif len(self._received) > LONGEST_REQUEST:
                self._left = _response(400, "text/plain", "the request is too long\n", head=False)
                self._send()
        except BlockingIOError:
            return
        except OSError:
            self._close()

    def _respond(self) -> bytes:
        words = self._received.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "text/plain", "not HTTP/1\n", head=False)
        if words[0] not in ("GET", "HEAD"):
            return _response(405, "text/plain", "only GET\n", head=False)
        status, kind, body = self._answer(words[1].partition("?")[0])
        return _response(status, kind, body, head=words[0] == "HEAD")

    def _send(self) -> None:
        sent = self._stream.send(self._left)
        self._left = self._left[sent:]
        if self._left:
            self._poller.change(self._stream.fileno(), OUT)
        else:
            self._stream.shutdown(socket.SHUT_WR)
            self._close()

    def _close(self) -> None:
        if self._stream.fileno() < 0:
            return
        self._timer.cancel()
        self._poller.remove(self._stream.fileno())
        hang_up(self._stream)
        self._closed()


def _response(status: int, kind: str, body: str, *, head: bool) -> bytes:
    data = body.encode()
    lines = [
        f"HTTP/1.1 {status} {REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(data)}",
        # Other pods tell by it whether their clock is right (init.controller_clock).
        time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else data)
