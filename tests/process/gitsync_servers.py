"""Git servers for tests and for bench/: smart http with basic authentication, and a line that can be cut."""

from __future__ import annotations

import base64
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class HttpGit:
    """`git http-backend` behind a small server: what a git host is, without its web pages."""

    folder: Path
    token: str | None = None
    url: str = ""
    requests: int = 0
    open: int = 0
    open_peak: int = 0
    running: int = 0
    running_peak: int = 0
    # (method, path, headers, body) of each request, where a list is put here.
    record: list[tuple[str, str, dict[str, str], bytes]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def serve(self) -> Iterator[HttpGit]:
        host = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def setup(self) -> None:
                super().setup()
                with host.lock:
                    host.open += 1
                    host.open_peak = max(host.open_peak, host.open)

            def finish(self) -> None:
                with host.lock:
                    host.open -= 1
                super().finish()

            def do_GET(self) -> None:
                self.backend(b"")

            def do_POST(self) -> None:
                self.backend(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

            def backend(self, body: bytes) -> None:
                with host.lock:
                    host.requests += 1
                    if host.record is not None:
                        host.record.append((self.command, self.path, dict(self.headers.items()), body))
                if host.token is not None:
                    want = "Basic " + base64.b64encode(f"x-access-token:{host.token}".encode()).decode()
                    if self.headers.get("Authorization") != want:
                        self.send_response(401)
                        self.send_header("WWW-Authenticate", 'Basic realm="git"')
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                path, _, query = self.path.partition("?")
                env = {
                    "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(host.folder), "GIT_HTTP_EXPORT_ALL": "1",
                    "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": self.command,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "GIT_CONFIG_NOSYSTEM": "1",
                    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
                }  # fmt: skip
                with host.lock:
                    host.running += 1
                    host.running_peak = max(host.running_peak, host.running)
                done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=env)
                with host.lock:
                    host.running -= 1
                head, _, content = done.stdout.partition(b"\r\n\r\n")
                status = 200
                headers = []
                for line in head.decode().splitlines():
                    name, _, value = line.partition(": ")
                    if name == "Status":
                        status = int(value.split()[0])
                    else:
                        headers.append((name, value))
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 4096

        with Server(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}/{{name}}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@dataclass
class Line:
    """A TCP line to a server that ends, or goes silent, after so many bytes from the server."""

    target: tuple[str, int]
    cut_after: int | None = None
    silent: bool = False
    port: int = 0
    # The most that one connection brought, and all of them together.
    passed: int = 0
    total: int = 0

    @contextmanager
    def open(self) -> Iterator[Line]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.stop = threading.Event()
            thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.stop.set()
                thread.join()

    def _accept(self, listener: socket.socket) -> None:
        lines = []
        while not self.stop.is_set():
            if select.select([listener], [], [], 0.05)[0]:
                client, _ = listener.accept()
                lines.append(threading.Thread(target=self._carry, args=(client,), daemon=True))
                lines[-1].start()
        for line in lines:
            line.join()

    def _carry(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target)
        except OSError:
            client.close()
            return
        down = 0
        with client, server:
            while not self.stop.is_set():
                for end in select.select([client, server], [], [], 0.05)[0]:
                    other = server if end is client else client
                    try:
                        data = end.recv(4096)
                    except OSError:
                        return
                    if not data:
                        return
                    if end is server:
                        if self.cut_after is not None and down + len(data) > self.cut_after:
                            data = data[: max(0, self.cut_after - down)]
                            other.sendall(data)
                            if not self.silent:
                                return
                            self.stop.wait()
                            return
                        down += len(data)
                        self.total += len(data)
                        self.passed = max(self.passed, down)
                    try:
                        other.sendall(data)
                    except OSError:
                        return
