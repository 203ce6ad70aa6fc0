"""A caching proxy for packages, on loopback, for as long as one build lasts.

Only what never changes under its name is kept: package files. Indices pass through, so that a mirror that moved on is
seen. HTTPS cannot be cached by a proxy and is tunnelled. The build's network must be the host's for a step to reach it.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from images.errors import ImagesError

KEPT = (".deb", ".udeb")
TIMEOUT = 60
CHUNK = 1 << 18
# Of the answer, these are about the connection and not about the file.
HOP = {"connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding", "upgrade"}


class CacheHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, directory: Path, upstream: str, **options: object) -> None:
        self.directory, self.upstream = directory, upstream
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # the server's own arguments

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the build reports its own progress."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not parts.netloc:
            self.send_error(400, "a proxy needs the whole URL")
            return
        cached = self.directory / hashlib.sha256(self.path.encode()).hexdigest() if parts.path.endswith(KEPT) else None
        if cached and cached.exists():
            self.answer(cached)
            return
        try:
            self.forward(cached)
        except (OSError, http.client.HTTPException) as error:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.send_error(502, f"{parts.netloc}: {error}")

    def answer(self, kept: Path) -> None:
        with kept.open("rb") as data:
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(data.fileno()).st_size))
            self.end_headers()
            while piece := data.read(CHUNK):
                self.wfile.write(piece)

    def forward(self, kept: Path | None) -> None:
        """Copy the mirror's reply to the build step, and into the cache once it is complete."""
        parts = urlsplit(self.path)
        way = urlsplit(self.upstream).netloc or parts.netloc
        target = self.path if self.upstream else parts._replace(scheme="", netloc="").geturl() or "/"
        connection = http.client.HTTPConnection(way, timeout=TIMEOUT)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        if kept:
            headers = {name: value for name, value in headers.items() if name.lower() != "range"}
        with contextlib.closing(connection):
            connection.request("GET", target, headers=headers | {"Connection": "close"})
            response = connection.getresponse()
            length = response.getheader("Content-Length")
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            if length is None:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.relay(response, kept if response.status == 200 and length else None, int(length or 0))

    def relay(self, response: http.client.HTTPResponse, kept: Path | None, length: int) -> None:
        if kept is None:
            while piece := response.read(CHUNK):
                self.wfile.write(piece)
            return
        descriptor, name = tempfile.mkstemp(dir=self.directory)
        temporary, came = Path(name), 0
        try:
            with os.fdopen(descriptor, "wb") as copy:
                while piece := response.read(CHUNK):
                    came += len(piece)
                    copy.write(piece)
                    # Kept before its last piece is sent: who has all of it and asks again finds it here.
                    if came == length:
                        copy.flush()
                        temporary.rename(kept)
                    self.wfile.write(piece)
        finally:
            temporary.unlink(missing_ok=True)

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        try:
            far = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT)
        except (OSError, ValueError) as error:
            self.send_error(502, str(error))
            return
        with far:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: far, far: self.connection}
            while ready := select.select(list(ends), [], [], TIMEOUT)[0]:
                for end in ready:
                    piece = end.recv(CHUNK)
                    if not piece:
                        self.close_connection = True
                        return
                    ends[end].sendall(piece)


@contextlib.contextmanager
def cache(directory: Path, upstream: str) -> Iterator[str]:
    """Run the proxy and yield its address. `upstream` is the site's own proxy, if it has one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = partial(CacheHandler, directory=directory, upstream=upstream)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    except OSError as error:
        raise ImagesError("keep packages", str(error), field="apt_cache") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
