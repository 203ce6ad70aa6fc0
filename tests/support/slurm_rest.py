"""A slurmrestd of known answers, for tests of the fleet's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fleet.act.slurm_client import SlurmClient

SECRET = b"s" * 32
NODE = {"name": "w1", "state": ["IDLE"], "reason": "", "comment": "", "alloc_cpus": 0}
Answer = tuple[int, bytes]


class Rest:
    """Answers by (method, path without its query); keeps what was asked."""

    def __init__(self, key: Path) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: Callable[[str, str], Answer] = lambda method, path: nodes(NODE)
        rest = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                rest.asked.append((self.command, self.path, body))
                status, text = rest.answers(self.command, self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET
            do_DELETE = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        key.write_bytes(SECRET)
        self.client = SlurmClient(f"127.0.0.1:{self.server.server_port}", key)


def nodes(*found: object, **more: object) -> Answer:
    return 200, json.dumps({"nodes": found, "last_update": {"set": True, "number": 7}, "errors": [], **more}).encode()
