"""Caching apt proxy: it fetches a package once and an index each time, and never keeps a partial package."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images import ImagesError
from images.archive.fetch import run_cache

PACKAGE = b"package " * 1000


class Mirror(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012  # one server a test, reset by the fixture

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/absent"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(PACKAGE)))
        self.end_headers()
        self.wfile.write(PACKAGE[:100] if self.path.startswith("/half") else PACKAGE)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing on the terminal."""


@pytest.fixture
def mirror() -> Iterator[str]:
    Mirror.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def get(tmp_path: Path) -> Iterator[Callable[[str], bytes]]:
    with run_cache(tmp_path / "kept", "") as address:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": address}))

        def through(url: str) -> bytes:
            with opener.open(url, timeout=10) as answer:
                data: bytes = answer.read()
                return data

        yield through


def test_a_package_is_asked_for_once(mirror: str, get: Callable[[str], bytes]) -> None:
    assert get(f"{mirror}/pool/x_1_amd64.deb") == get(f"{mirror}/pool/x_1_amd64.deb") == PACKAGE
    assert Mirror.asked == ["/pool/x_1_amd64.deb"]


def test_an_index_is_asked_for_every_time(mirror: str, get: Callable[[str], bytes]) -> None:
    assert get(f"{mirror}/dists/x/InRelease") == get(f"{mirror}/dists/x/InRelease") == PACKAGE
    assert len(Mirror.asked) == 2


def test_half_a_package_is_not_kept(mirror: str, get: Callable[[str], bytes], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="IncompleteRead"):
            get(f"{mirror}/half/x_1_amd64.deb")
    assert len(Mirror.asked) == 2
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_the_mirror_has_not_is_its_own_answer(mirror: str, get: Callable[[str], bytes], tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{mirror}/absent/x_1_amd64.deb")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_mirror_that_is_away_is_a_bad_gateway(get: Callable[[str], bytes]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="502"):
        get("http://127.0.0.1:9/x_1_amd64.deb")


def test_a_sites_own_proxy_is_the_way_out(mirror: str, tmp_path: Path) -> None:
    with run_cache(tmp_path / "kept", mirror) as address:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": address}))
        with opener.open("http://nowhere.invalid/x_1_amd64.deb", timeout=10) as answer:
            assert answer.read() == PACKAGE
    assert Mirror.asked == ["http://nowhere.invalid/x_1_amd64.deb"]


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ImagesError, match="apt_cache"), run_cache(tmp_path / "file/kept", ""):
        pass
