"""The mirror's HTTP server: read-only git for all nodes, and the ring's board.

It serves only commits that passed the mirror's own verification; each pod verifies again. In git's protocol 2 a reply
of upload-pack depends only on the request and the repository, so the mirror caches replies: a thousand pods that fetch
the same commit cost one git process.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gitsync.errors import GitsyncError
from gitsync.mirror.update import inside
from gitsync.repo import child
from gitsync.rings import Board, is_authentic, next_delay, read_secret
from gitsync.settings import GitsyncSettings, content_length, split_address
from gitsync.state import load_state, summarise
from gitsync.tree import publish
from ground.sockets import notify

# Bounds on the mirror's requests: a deadline for the whole request, a limit on its size, and only verified hashes.
# Seconds without a byte, and seconds for a whole request, after which the thread serves the next connection.
IDLE = 5.0
REQUEST = 10.0
# Seconds after which a connection is closed with its next reply.
CONNECTION = 30.0
# Largest request body: a fetch sends a list of hashes, a report is a sentence.
LARGEST = 1 << 20


class DeadlineReader(io.RawIOBase):
    """Read a socket until a deadline. A socket's own timeout would start again with each byte."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.until = time.monotonic() + REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        remaining = self.until - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request exceeded its deadline")
        self._source.settimeout(min(IDLE, remaining))
        try:
            return self._source.recv_into(buffer)
        finally:
            self._source.settimeout(IDLE)


def unpack(body: bytes) -> bytes | None:
    """Decompress a gzip body; None when it is not gzip or too large."""
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(body)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return unpacked if len(unpacked) <= LARGEST else None


def parse_wants(body: bytes) -> set[str] | None:
    """Return the hashes that a request to upload-pack wants; None when it is not a sequence of packet lines. Pure.

    git itself, in protocol 2, serves any object by its hash, so the mirror must check them.
    """
    hashes, at = set(), 0
    while at < len(body):
        head = body[at : at + 4]
        if len(head) < 4 or not head.isalnum():
            return None
        try:
            size = int(head, 16)
        except ValueError:
            return None
        if size == 3 or at + size > len(body):
            return None
        line = body[at + 4 : at + size]
        if line.startswith(b"want "):
            hashes.add(line.split()[1].decode("ascii", "replace") if len(line.split()) > 1 else "")
        at += max(size, 4)
    return hashes


# Cache of replies that are equal for every client. The first request computes a reply; concurrent ones wait for it.

# Bytes counted for an entry beside its reply, and the largest number of entries of any size.
OVERHEAD = 1024
MAX_ENTRIES = 4096


class Cache:
    """LRU cache bounded by bytes and by number of entries; keys are small. A failure (None) is not cached."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held = 0
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, bytes] = OrderedDict()
        self._making: dict[Hashable, Future[bytes | None]] = {}

    def get(self, key: Hashable, make: Callable[[], bytes | None]) -> tuple[bytes | None, bool]:
        """Return the reply, and whether this call computed it."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key], False
            waiting = self._making.get(key)
            if waiting is None:
                future: Future[bytes | None] = Future()
                self._making[key] = future
        if waiting is not None:
            return waiting.result(), False
        reply: bytes | None = None
        try:
            reply = make()
        finally:
            with self._lock:
                del self._making[key]
                if reply is not None:
                    self._keep(key, reply)
            future.set_result(reply)
        return reply, True

    def _keep(self, key: Hashable, reply: bytes) -> None:
        if len(reply) + OVERHEAD > self._room:
            return
        self._made[key] = reply
        self._held += len(reply) + OVERHEAD
        while self._held > self._room or len(self._made) > MAX_ENTRIES:
            _, old = self._made.popitem(last=False)
            self._held -= len(old) + OVERHEAD


REPOSITORY = "/scripts.git"
WORKERS = 64
BACKLOG = 4096
PROTOCOL = re.compile(r"version=[012](:[a-z0-9=:.-]{0,40})?")
MAX_GIT_PROCESSES = 4
# Seconds between two log lines about failed requests: a hostile client must not fill the log.
LOG_INTERVAL = 60.0


class MirrorCounters:
    """Counters of the mirror for /metrics."""

    def __init__(self) -> None:
        names = ("connections", "open", "open_peak", "requests", "gits", "kept", "bytes", "errors")
        self._numbers = dict.fromkeys(names, 0)
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._numbers[name] += by
            self._numbers["open_peak"] = max(self._numbers["open_peak"], self._numbers["open"])

    def render(self) -> str:
        with self._lock:
            return "".join(f"minivm_gitsync_mirror_{name} {number}\n" for name, number in self._numbers.items())


class Mirror:
    """The mirrored repository, its reply cache, and the ring's board."""

    def __init__(self, settings: GitsyncSettings) -> None:
        self.settings = inside(settings)
        self.repository = self.settings.layout.repository
        self.counters = MirrorCounters()
        self.cache = Cache(128 << 20)
        self.gits = threading.BoundedSemaphore(MAX_GIT_PROCESSES)
        self.board = Board(self.settings.root / "ring.json", time.time)
        self.hurry = threading.Event()
        self.stopping = False

    def upload_pack(self, protocol: str, body: bytes | None) -> bytes | None:
        """Return upload-pack's reply, or None if it failed or a hash was not verified. No `body`: the advertisement."""
        state = load_state(self.settings.layout.state)
        published = state.published
        if body is not None:
            objects = parse_wants(body)
            if objects is None or not objects <= {name for each in state.commits for name in (each.oid, each.commit)}:
                return None
        # The key holds a digest: any client may send a body of a MiB.
        digest = None if body is None else hashlib.sha256(body).digest()
        key = (published.oid if published else "", protocol, digest)
        reply, fresh = self.cache.get(key, lambda: self._run(protocol, body))
        self.counters.add("gits" if fresh else "kept")
        return reply

    def _run(self, protocol: str, body: bytes | None) -> bytes | None:
        argv = [
            "git", "-c", "uploadpack.hideRefs=refs/minivm", "-c", "uploadpack.allowAnySHA1InWant=true",
            "-c", "safe.bareRepository=all", "upload-pack", "--strict", "--stateless-rpc", "--timeout=60",
        ]  # fmt: skip
        if body is None:
            argv.append("--http-backend-info-refs")
        argv.append(str(self.repository))
        env = child.make_environment({"GIT_PROTOCOL": protocol} if protocol else {})
        with self.gits:
            try:
                done = subprocess.run(argv, input=body or b"", capture_output=True, env=env, timeout=120, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return None
        return done.stdout if done.returncode == 0 else None

    def keep_updated(self) -> None:
        """Update the mirror for ever, each update in its own process."""
        while not self.stopping:
            self.hurry.clear()
            try:
                failures = self._update()
            except OSError as error:
                print(f"gitsync mirror: cannot start an update: {error}", flush=True)
                failures = 1
            self.hurry.wait(next_delay(self.settings.pod, self.settings.period, failures, self.settings.backoff_max))

    def _update(self) -> int:
        """Run one update; return how many updates failed in a row."""
        done = subprocess.run(
            [sys.executable, "-I", "-m", "gitsync.mirror.update"], stdin=subprocess.DEVNULL, check=False
        )
        state = load_state(self.settings.layout.state)
        if state.published is not None:
            self.board.see(state.published.commit)
            notify("READY=1")
        notify(f"STATUS={summarise(state, self.settings)}")
        return max(state.failures, 1 if done.returncode else 0)


class MirrorHandler(BaseHTTPRequestHandler):
    """Routes of the mirror: git's upload-pack, /ring, /webhook and /metrics."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE
    server: MirrorServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.reader = DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self.reader)
        self.until = time.monotonic() + CONNECTION

    def handle_one_request(self) -> None:
        self.reader.until = time.monotonic() + REQUEST
        super().handle_one_request()

    def do_GET(self) -> None:
        self.server.mirror.counters.add("requests")
        parts = urlsplit(self.path)
        if parts.path == f"{REPOSITORY}/info/refs":
            self.serve_info_refs(parse_qs(parts.query).get("service", [""])[0])
        elif parts.path.startswith("/ring/"):
            view = self.server.mirror.board.view(parts.path.removeprefix("/ring/"))
            body = json.dumps(view or {"first_seen": None, "good": 0, "failed": 0, "reasons": []}).encode()
            self.answer(200, body, "application/json")
        elif parts.path == "/metrics":
            self.answer(200, self.server.mirror.counters.render().encode(), "text/plain; version=0.0.4")
        else:
            self.answer(404)

    def do_POST(self) -> None:
        self.server.mirror.counters.add("requests")
        body = self.read_body()
        if body is None:
            self.close_connection = True
            return self.answer(413)
        if self.path == f"{REPOSITORY}/git-upload-pack":
            return self.serve_packs(body)
        if self.path == "/ring":
            return self.receive_result(body)
        if self.path == "/webhook":
            return self.receive_webhook(body)
        return self.answer(404)

    def read_protocol(self) -> str:
        header = self.headers.get("Git-Protocol", "")
        return header if PROTOCOL.fullmatch(header) else ""

    def serve_info_refs(self, service: str) -> None:
        if service != "git-upload-pack":
            return self.answer(403)
        reply = self.server.mirror.upload_pack(self.read_protocol(), None)
        if reply is None:
            return self.answer(503)
        # Protocol 2 begins with its version; older ones begin with the name of the service.
        if not reply.startswith(b"000eversion 2"):
            reply = b"001e# service=git-upload-pack\n0000" + reply
        return self.answer(200, reply, "application/x-git-upload-pack-advertisement")

    def serve_packs(self, body: bytes) -> None:
        reply = self.server.mirror.upload_pack(self.read_protocol(), body)
        if reply is None:
            return self.answer(503)
        return self.answer(200, reply, "application/x-git-upload-pack-result")

    def is_signed(self, body: bytes, secret: Path | None) -> bool:
        return is_authentic({name.lower(): value for name, value in self.headers.items()}, body, read_secret(secret))

    def receive_result(self, body: bytes) -> None:
        mirror = self.server.mirror
        if mirror.settings.ring_secret is not None and not self.is_signed(body, mirror.settings.ring_secret):
            return self.answer(403)
        return self.answer(204 if mirror.board.report(body) else 400)

    def receive_webhook(self, body: bytes) -> None:
        mirror = self.server.mirror
        if not self.is_signed(body, mirror.settings.webhook_secret):
            return self.answer(403)
        mirror.hurry.set()
        return self.answer(202)

    def read_body(self) -> bytes | None:
        """Read and decompress the request's body; None without a length, or when either size is too large."""
        length = content_length(self.headers.get("Content-Length", ""), LARGEST)
        if length is None:
            return None
        body = self.rfile.read(length)
        return unpack(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.server.mirror.counters.add("bytes", len(body))
        self.send_response_only(status)
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        if self.close_connection or time.monotonic() > self.until:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a thousand pods would fill the log."""


class MirrorServer(socketserver.TCPServer):
    """TCP server with a fixed number of threads; further connections wait in the kernel's queue."""

    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], mirror: Mirror) -> None:
        self.mirror = mirror
        self.last_logged = -LOG_INTERVAL
        super().__init__(address, MirrorHandler)

    def work(self) -> None:
        """Serve connections for ever: no request may end the thread."""
        while True:
            try:
                request, client = self.get_request()
            except OSError:
                if self.fileno() < 0:
                    return
                # The client has gone, or no file descriptor is free.
                time.sleep(0.05)
                continue
            self.mirror.counters.add("connections")
            self.mirror.counters.add("open")
            try:
                self.finish_request(request, client)
            except (OSError, ValueError):
                pass  # the client disconnected, or did not speak HTTP
            except Exception as error:
                self.mirror.counters.add("errors")
                if time.monotonic() - self.last_logged > LOG_INTERVAL:
                    self.last_logged = time.monotonic()
                    print(f"gitsync mirror: a request failed: {type(error).__name__}: {error}", flush=True)
            finally:
                self.shutdown_request(request)
                self.mirror.counters.add("open", -1)


def serve(settings: GitsyncSettings) -> None:
    """Serve the mirror until SIGTERM or SIGINT."""
    if settings.repo is None:
        raise GitsyncError("serve the mirror", "no repository is set", field="MINIVM_GITSYNC_REPO")
    mirror = Mirror(settings)
    if settings.ring_secret is not None and not read_secret(settings.ring_secret):
        # Refusing every report would look as if no node ever failed.
        raise GitsyncError("serve the mirror", "the ring's secret is missing or empty", file=settings.ring_secret)
    publish.prepare(mirror.settings.layout)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with _listening(settings.mirror, mirror) as server:
        threads = [threading.Thread(target=server.work, daemon=True) for _ in range(WORKERS)]
        threads.append(threading.Thread(target=mirror.keep_updated, daemon=True))
        for thread in threads:
            thread.start()
        host, port = server.server_address[:2]
        print(f"gitsync mirror: serves http://{host!s}:{port}{REPOSITORY}", flush=True)
        stop.wait()
        mirror.stopping = True
    # Daemon threads may hold a connection; end the process without waiting for them.
    sys.stdout.flush()
    os._exit(0)


def _listening(address: str, mirror: Mirror) -> MirrorServer:
    field = "MINIVM_GITSYNC_MIRROR"
    try:
        return MirrorServer(split_address(address, field), mirror)
    except OSError as error:
        raise GitsyncError("listen", f"{address}: {error.strerror or error}", field=field) from error
