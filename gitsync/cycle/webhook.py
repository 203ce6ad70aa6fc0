"""Listener for the webhooks of GitHub, GitLab and Gitea: a push on the git server starts the next cycle at once.

It can do no more than that: all pokes during a cycle cause one further cycle, which decides what to publish.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gitsync.rings import is_authentic, read_secret
from gitsync.settings import GitsyncSettings, content_length, split_address

LARGEST = 5 << 20
# Deadline of a request, however slowly its bytes come, and the most open connections. A new connection closes the
# oldest, so that idle ones keep no push out.
DEADLINE_S = 10.0
MOST = 16


class Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: dict[socket.socket, threading.Timer] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a deadline, and close the oldest one where too many are open."""
        timer = threading.Timer(DEADLINE_S, _hang_up, [request])
        timer.daemon = True
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MOST else None
            self._open[request] = timer
        timer.start()
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            timer = self._open.pop(request, None)
        if timer is not None:
            timer.cancel()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a peer that hangs up in the middle must not fill the log."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def make_handler(secret: Path | None, poke: Callable[[], object]) -> type[BaseHTTPRequestHandler]:
    """Build the request handler for this secret."""

    class WebhookHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.answer(self.judge())

        def judge(self) -> int:
            """Poke where the request is authentic; return the status."""
            length = content_length(self.headers.get("Content-Length", ""), LARGEST)
            if length is None:
                return 413
            body = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            if len(body) < length or not is_authentic(headers, body, read_secret(secret)):
                return 403
            poke()
            return 202

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: an unknown client must not fill the log."""

    return WebhookHandler


def serve(settings: GitsyncSettings) -> None:
    """Listen until the process ends."""
    address = split_address(settings.webhook or "", "MINIVM_GITSYNC_WEBHOOK")
    with Listener(address, make_handler(settings.webhook_secret, lambda: poke(settings))) as server:
        server.serve_forever()


def poke(settings: GitsyncSettings) -> bool:
    """Start the running loop's next cycle now; return False when no loop listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(b"now", str(settings.layout.wake))
    except OSError:
        return False
    return True
