"""The lab's registry: what the store of images has, for a node that no longer has it.

`python -m tests.kubernetes.registry STORE ADDRESS`. It answers what containerd asks for a pull, and nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 5000
# In the store: reference -> (media type, digest).
NAMES = "names.json"
WANTED = re.compile(
    r"/v2/(?P<name>[\w./-]+)/(?P<kind>manifests|blobs)/(?P<which>sha256:[0-9a-f]{64}|[\w.-]+)(\?ns=(?P<host>[\w.:-]+))?"
)
Found = tuple[str, str, Path]


def blob(store: Path, digest: str) -> Path:
    return store / "io.containerd.content.v1.content" / "blobs" / digest.replace(":", "/")


def found(store: Path, path: str) -> Found | None:
    """Media type, digest and file of what somebody asks for."""
    wanted = WANTED.fullmatch(path)
    if not wanted:
        return None
    names: dict[str, tuple[str, str]] = json.loads((store / NAMES).read_text())
    kind, digest = "application/octet-stream", wanted["which"]
    if wanted["kind"] == "manifests":
        by_tag = names.get(f"{wanted['host'] or 'docker.io'}/{wanted['name']}:{digest}")
        by_digest = next((item for item in names.values() if item[1] == digest), None)
        if not (known := by_tag or by_digest):
            return None
        kind, digest = known
    file = blob(store, digest)
    return (kind, digest, file) if file.is_file() else None


class Pull(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Path

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        if file := self.answer():
            with file.open("rb") as source:
                shutil.copyfileobj(source, self.wfile)

    def answer(self) -> Path | None:
        what = found(self.store, self.path)
        self.send_response(HTTPStatus.OK if what or self.path == "/v2/" else HTTPStatus.NOT_FOUND)
        if what:
            self.send_header("Content-Type", what[0])
            self.send_header("Docker-Content-Digest", what[1])
        self.send_header("Content-Length", str(what[2].stat().st_size) if what else "0")
        self.end_headers()
        return what[2] if what else None


def main(store: str, address: str) -> None:
    Pull.store = Path(store)
    ThreadingHTTPServer((address, PORT), Pull).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
