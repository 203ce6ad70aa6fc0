"""Faulty registry answers: each gives a one-sentence error, bounded memory use, and no leaked password."""

from __future__ import annotations

import gzip
import hashlib
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images import ImagesError
from images.ship import provenance
from images.ship.registry import CHUNK, LARGEST, Blob, Login, Registry, RegistryPath, inflate_bounded, load_trust

LOGIN = Login("pusher", "hunter2")


class Bad(ThreadingHTTPServer):
    """Registry that answers every request alike, and records the Authorization headers."""

    body = b""
    length: int | str = 0  # the Content-Length that it claims; 0 for the true one
    location = ""
    challenge = ""  # its WWW-Authenticate header for every request
    seen: list[tuple[str, str]]

    def __init__(self) -> None:
        self.seen = []
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def registry(self) -> Registry:
        return Registry(RegistryPath.parse(f"127.0.0.1:{self.port}"), "worker", LOGIN)


class Answer(BaseHTTPRequestHandler):
    server: Bad

    def answer(self) -> None:
        self.server.seen.append((self.command, self.headers.get("Authorization", "")))
        self.send_response(401 if self.server.challenge else 200)
        if self.server.challenge:
            self.send_header("WWW-Authenticate", self.server.challenge)
        self.send_header("Content-Length", str(self.server.length or len(self.server.body)))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def running() -> Iterator[Bad]:
    with Bad() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


bad = pytest.fixture(running)
other = pytest.fixture(running)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b"{}", b'{"schemaVersion": 1}', b'{"schemaVersion": 2, "config": {}, "layers": []}',
     b'{"schemaVersion": 2, "config": {"digest": "x", "size": "large"}, "layers": []}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_manifest_is_told(bad: Bad, body: bytes) -> None:
    bad.body = body
    with pytest.raises(ImagesError, match="sha256:x is not an image manifest of schema 2"):
        bad.registry().read_manifest("sha256:x")


def test_a_description_without_end_is_not_read_to_its_end(bad: Bad) -> None:
    bad.body = bytes(LARGEST + 2)
    with pytest.raises(ImagesError, match="more than 4 MiB"):
        bad.registry().read_manifest("latest")


def test_a_connection_that_breaks_off_is_the_registrys_silence(bad: Bad) -> None:
    bad.body, bad.length = b"{", 500
    with pytest.raises(ImagesError, match="cannot reach"):
        bad.registry().read_manifest("latest")


def test_a_layer_that_cannot_be_unpacked_is_not_trusted(bad: Bad) -> None:
    bad.body = gzip.compress(b"a layer")[:12] + bytes(20)
    digest = f"sha256:{hashlib.sha256(bad.body).hexdigest()}"
    with pytest.raises(ImagesError, match=r"cannot trust .* cannot be unpacked"):
        bad.registry().check_layer(Blob(digest, len(bad.body)), "sha256:y")


def test_a_layer_is_unpacked_in_pieces_and_compared_whole(bad: Bad) -> None:
    layer = bytes(5 * CHUNK + 1)
    bad.body = gzip.compress(layer)
    packed, unpacked = (f"sha256:{hashlib.sha256(data).hexdigest()}" for data in (bad.body, layer))
    bad.registry().check_layer(Blob(packed, len(bad.body)), unpacked)
    pieces = [len(piece) for piece in inflate_bounded(zlib.decompressobj(wbits=31), bad.body)]
    assert max(pieces) <= CHUNK and sum(pieces) >= 5 * CHUNK


def test_an_upload_that_leads_elsewhere_does_not_take_the_password_along(bad: Bad, other: Bad) -> None:
    bad.location = f"http://127.0.0.1:{other.port}/v2/worker/blobs/uploads/1"
    bad.registry().check_upload()
    assert bad.seen == [("POST", LOGIN.basic())] and other.seen == []
    bad.location = "/v2/worker/blobs/uploads/1"
    bad.registry().check_upload()
    assert [method for method, _ in bad.seen] == ["POST", "POST", "DELETE"]


def test_a_certificate_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "registry.site"
    folder.mkdir()
    (folder / "ca.crt").write_text("junk")
    monkeypatch.setattr("images.ship.registry.CERTS", folder.parent)
    with pytest.raises(ImagesError, match=r"no certificate that can be read.*ca\.crt"):
        load_trust("registry.site")


@pytest.mark.parametrize(
    "item",
    ['{"artifactType": "%s", "digest": "x://elsewhere"}', '{"artifactType": "%s"}',
     '{"artifactType": "%s", "digest": 3}', '{"artifactType": "%s", "digest": "sha256:../../%s"}', "3"],
)  # fmt: skip
def test_a_list_of_what_is_no_digest_is_none(bad: Bad, item: str) -> None:
    bad.body = b'{"manifests": [%s]}' % item.replace("%s", "a document").encode()
    registry = bad.registry()
    with pytest.raises(ImagesError, match="its list of referrers is not a list of descriptors"):
        list(provenance.read_attached(registry, {"digest": "sha256:" + "0" * 64}, "a document"))
    with pytest.raises(ImagesError, match=f"cannot read 127.0.0.1:{bad.port}/worker: 'x://elsewhere' is no digest"):
        registry.read_by_digest("/blobs/x://elsewhere", "x://elsewhere")


@pytest.mark.parametrize("length", ["", "many", "-5", "9" * 5000])
def test_a_layer_of_no_length_is_not_there(bad: Bad, length: str) -> None:
    bad.length = length or "x"
    assert not bad.registry().has(Blob("sha256:" + "0" * 64, 5))


@pytest.mark.parametrize("realm", ["", "nowhere", "file:///etc/passwd", "ftp://127.0.0.1/"])
def test_a_registry_that_does_not_say_who_gives_tokens_is_told(bad: Bad, realm: str) -> None:
    bad.challenge = f'Bearer realm="{realm}",service="x"' if realm else "Bearer service=x"
    with pytest.raises(ImagesError, match="it does not say who gives tokens"):
        bad.registry().read_manifest("latest")
