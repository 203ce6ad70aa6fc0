"""A listener that turns a push on the git server into a poke of the loop: GitHub's, GitLab's and Gitea's webhooks.

All it can do is hurry the next cycle (any number of pokes during one is one more); what is
published is decided as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from gitsync.addresses import split_address
from gitsync.cycle.wake import poke
from gitsync.rings.signing import authentic, read_secret
from gitsync.settings import Settings

LARGEST = 5 << 20
TIMEOUT = 5.0


def handler(secret: Path | None, poke: Callable[[], object]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT

        def do_POST(self) -> None:
            self.answer(self.judge())

        def judge(self) -> int:
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > LARGEST:
                return 413
            body = self.rfile.read(int(length))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if not authentic(headers, body, read_secret(secret)):
                return 403
            poke()
            return 202

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a stranger must not fill the log."""

    return Handler


def serve(settings: Settings) -> None:
    address = split_address(settings.webhook or "", "MINIVM_GITSYNC_WEBHOOK")
    with HTTPServer(address, handler(settings.webhook_secret, lambda: poke(settings))) as server:
        server.serve_forever()
