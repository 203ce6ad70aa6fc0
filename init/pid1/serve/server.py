"""HTTP for probes and scrapes: one GET per connection, and the answer for each path.

Small on purpose; nothing here can block or grow. Any client that reaches the pod can read the answers, so they quote no
service's output.
"""

from __future__ import annotations

import errno
import socket
import struct
import time

from init.errors import ORDINARY, ConfigError
from init.fields import number
from init.pid1.serve.control import hang_up
from init.pid1.spawn.procs import SCARCE
from init.pid1.wait import IN, OUT, Scope
from init.view import reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.pid1.core import Core
    from init.pid1.wait import Poller, Timer
    from init.view.metrics import Handed

    Answer = Callable[[str], tuple[int, str, str]]

WRONG_ADDRESS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
LONGEST_REQUEST = 8192
MOST_CONNECTIONS = 64
BACKLOG = 1024
HEADER = 1.0  # seconds for the request to arrive
PATIENCE = 10.0  # seconds for the answer to be read
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

# A socket filter: the kernel drops packets of the loopback device (number 1 in every network namespace).
_LOAD_DEVICE, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_OUTSIDE = (
    struct.pack("HBBI", _LOAD_DEVICE, 0, 0, 0xFFFFF008)  # SKF_AD_OFF + SKF_AD_IFINDEX
    + struct.pack("HBBI", _IF_EQUAL, 0, 1, 1)
    + struct.pack("HBBI", _RETURN, 0, 0, 0)
    + struct.pack("HBBI", _RETURN, 0, 0, 0xFFFFFFFF)
)
_SO_ATTACH_FILTER = 26


def listen(address: str, field: str = "MINIVM_HTTP", *, outside: bool = False) -> tuple[socket.socket, str]:
    """Open the listener; with `outside`, also return why the kernel lets the pod's own processes connect, or ""."""
    host, _, port = address.rpartition(":")
    place = number(port)
    if place is None or place > 65535:
        raise ConfigError("serve HTTP", f"{address!r} is not host:port", field=field)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), place))
        refused = _drop_inside(listener) if outside else ""
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if not isinstance(error, socket.gaierror) and error.errno not in WRONG_ADDRESS:
            raise  # retried: the address is valid
        raise ConfigError("serve HTTP", f"{address}: {error.strerror or error}", field=field) from None
    return listener, refused


def _drop_inside(listener: socket.socket) -> str:
    from array import array

    program = array("B", _OUTSIDE)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, program.buffer_info()[0]))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return error.strerror or str(error)
    return ""


def is_inside(stream: socket.socket) -> bool:
    """Tell if the client has an address of this pod: to such a destination the kernel sends from the same address."""
    try:
        address, _, *scope = stream.getpeername()
        if address == "::1" or address.rpartition(":")[2].startswith("127."):
            return True
        with socket.socket(stream.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((address, 9, *scope))  # a datagram socket: nothing is sent
            return bool(probe.getsockname()[0] == address)
    except OSError:
        return False  # unknown: it may be the kubelet, which must get its answer


class StatusServer:
    """`outside`: hang up on callers from inside the pod, for a kernel that does not drop them itself."""

    def __init__(self, poller: Poller, listener: socket.socket, answer: Answer, *, outside: bool = False) -> None:
        self._poller, self._listener, self._answer, self._outside = poller, listener, answer, outside
        self._open: dict[Exchange, None] = {}  # the oldest first
        poller.add(listener.fileno(), IN, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        name = self._listener.getsockname()
        return name[0], name[1]

    def _accept(self, _: int) -> None:
        for _ in range(32):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client has hung up
            if self._outside and is_inside(stream):
                hang_up(stream)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                self._make_room()
            try:
                exchange = Exchange(self._poller, stream, self._answer, self._forget)
            except ORDINARY:
                hang_up(stream)  # the client sees a closed connection and connects again
                continue
            self._open[exchange] = None
            exchange.begin()

    def _make_room(self) -> None:
        """Close the oldest connection without a request, else the oldest: an idle client may be none at all."""
        oldest = next((exchange for exchange in self._open if not exchange.has_request), None)
        (oldest or next(iter(self._open))).close()

    def _forget(self, exchange: Exchange) -> None:
        self._open.pop(exchange, None)

    def close(self) -> None:
        self._poller.remove(self._listener.fileno())
        self._listener.close()


class Exchange:
    """One request and its answer."""

    def __init__(
        self, poller: Poller, stream: socket.socket, answer: Answer, closed: Callable[[Exchange], None]
    ) -> None:
        self._poller = Scope(poller, lambda _: self.close())
        self._stream, self._answer, self._closed = stream, answer, closed
        stream.setblocking(False)
        self._received = b""
        self._left = b""
        self._mask = 0  # events waited for; usually none
        self._timer: Timer | None = None

    @property
    def has_request(self) -> bool:
        """True once the whole request has arrived."""
        return bool(self._left)

    def begin(self) -> None:
        """Read at once: the request usually comes with the connection."""
        self._poller.attempt(self._ready, 0)
        if self._stream.fileno() >= 0 and not self._mask:
            self._poller.attempt(self._wait_for, IN, HEADER)

    def _wait_for(self, mask: int, seconds: float) -> None:
        if mask == self._mask:
            return
        if self._mask:
            self._poller.change(self._stream.fileno(), mask)
        else:
            self._poller.add(self._stream.fileno(), mask, self._ready)
        self._mask = mask
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._poller.after(seconds, self.close)

    def _ready(self, _: int) -> None:
        try:
            if self._left:
                self._send()
                return
            chunk = self._stream.recv(LONGEST_REQUEST)
            self._received += chunk
            if not chunk:
                self.close()
            elif b"\r\n\r\n" in self._received or b"\n\n" in self._received:
                self._left = self._respond()
                self._send()
            elif len(self._received) > LONGEST_REQUEST:
                self._left = _response(400, "text/plain", "the request is too long\n", head=False)
                self._send()
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _respond(self) -> bytes:
        words = self._received.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "text/plain", "not HTTP/1\n", head=False)
        if words[0] not in ("GET", "HEAD"):
            return _response(405, "text/plain", "only GET\n", head=False)
        status, kind, body = self._answer(words[1].partition("?")[0])
        return _response(status, kind, body, head=words[0] == "HEAD")

    def _send(self) -> None:
        try:
            sent = self._stream.send(self._left)
        except BlockingIOError:
            sent = 0
        self._left = self._left[sent:]
        if self._left:
            self._wait_for(OUT, PATIENCE)
        else:
            self._stream.shutdown(socket.SHUT_WR)
            self.close()

    def close(self) -> None:
        if self._stream.fileno() < 0:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._poller.remove(self._stream.fileno())
        hang_up(self._stream)
        self._closed(self)


def _response(status: int, kind: str, body: str, *, head: bool) -> bytes:
    data = body.encode(errors="backslashreplace")
    lines = [
        f"HTTP/1.1 {status} {REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(data)}",
        # Other pods check their clock by it (init.slurm.client).
        time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else data)


JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def pages(core: Core, counters: Callable[[], Mapping[str, int]]) -> Callable[[str], tuple[int, str, str]]:
    """Return a function from a path to status, content type and body."""
    handed: list[Handed] = []

    def answer(path: str) -> tuple[int, str, str]:
        now = core.poller.now()
        if path == "/livez":
            return 200, TEXT, "ok\n"
        if path in ("/readyz", "/startupz"):
            causes = reasons.pod_reasons(core.engine, now, quoting=False)
            # The kubelet restarts a pod whose start lasts too long, which must not cut what a late service does.
            is_late = any(state.late for state in core.engine.states.values())
            if path == "/startupz" and (core.engine.ready_at is not None or is_late):
                causes = ()
            return 503 if causes else 200, TEXT, "".join(f"{reason}\n" for reason in causes or ("ok",))
        if path == "/status":
            from json import dumps

            from init.view.status import to_mapping

            shown = reasons.snapshot(core.engine, core.settings.pod, now, quoting=False)
            return 200, JSON, dumps(to_mapping(shown), indent=1) + "\n"
        if path == "/conditions":
            from json import dumps

            from init.view.conditions import read_conditions

            conditions = read_conditions(core.engine, now, core.settings.run)
            return 200, JSON, dumps({"pod": core.settings.pod, "conditions": conditions}) + "\n"
        if path == "/metrics":
            from init.view import metrics
            from init.view.metrics import Handed

            if not handed:
                handed.append(Handed(f"{core.settings.run}/metrics.d"))
            shown = reasons.snapshot(core.engine, core.settings.pod, now, quoting=False)
            return 200, metrics.CONTENT_TYPE, metrics.render(shown, counters(), handed[0].lines())
        return 404, TEXT, "known: /livez /readyz /startupz /status /conditions /metrics\n"

    return answer
