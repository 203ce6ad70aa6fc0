"""A caching HTTP proxy of the test's own: it counts what passes, and, cut off, answers only from what it kept.

With it a test builds once against the machine's real mirror, and then shows what a site without a way out sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Proxy:
    """The proxy's memory: `asked` is every address in order, `kept` a directory of answers."""

    def __init__(self, kept: Path) -> None:
        self.kept, self.asked, self.url, self.online = kept, list[str](), "", True
        self.lock = threading.Lock()
        kept.mkdir(parents=True, exist_ok=True)

    def path(self, url: str) -> Path:
        return self.kept / hashlib.sha256(url.encode()).hexdigest()

    def fetch(self, url: str) -> Path | None:
        """Return the kept answer, fetched first where allowed, or None if there is none."""
        kept = self.path(url)
        with self.lock:
            self.asked.append(url)
        if kept.exists() or not self.online:
            return kept if kept.exists() else None
        temporary = kept.with_suffix(f".{threading.get_ident()}")
        try:
            # Directly: the proxy is the way out, whatever the environment says.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=60) as answer, temporary.open("wb") as target:
                shutil.copyfileobj(answer, target)
        except (OSError, urllib.error.URLError):
            temporary.unlink(missing_ok=True)
            return None
        temporary.rename(kept)
        (kept.with_suffix(".url")).write_text(url)
        return kept

    def mirror(self, target: Path) -> None:
        """Write the kept answers as a mirror's directory: by the addresses' paths, without their hosts."""
        for note in self.kept.glob("*.url"):
            path = target / unquote(urlsplit(note.read_text()).path).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(note.with_suffix(""), path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(*arguments)  # type: ignore[arg-type]  # the server's own arguments

    def do_GET(self) -> None:
        kept = self.proxy.fetch(self.path)
        if kept is None:
            self.send_error(404 if self.proxy.online else 504)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(kept.stat().st_size))
        self.end_headers()
        with kept.open("rb") as data:
            shutil.copyfileobj(data, self.wfile)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal: `asked` is the log."""


@contextlib.contextmanager
def proxy(kept: Path) -> Iterator[Proxy]:
    memory = Proxy(kept)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, proxy=memory))
    memory.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
