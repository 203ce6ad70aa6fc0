"""Direct queries to the docker engine: its answer unchanged, and nothing when the answer is invalid."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest
from click.testing import CliRunner

import build
from images.engine import store

LISTED = b'[{"Id": "sha256:1", "Size": 5, "RepoTags": ["a:1", "b:2"]}, {"Id": "sha256:2", "Size": 6, "RepoTags": null}]'


@contextmanager
def answering(directory: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Serve one request as a fake engine that sends `answer` in two pieces."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(directory / "engine.sock"))
        server.listen()

        def once() -> None:
            with server.accept()[0] as connection:
                asked.append(connection.recv(4096))
                for piece in (answer[:30], answer[30:]):
                    connection.sendall(piece)

        thread = threading.Thread(target=once)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{directory}/engine.sock")
        yield asked
        thread.join()


def test_an_answer_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + LISTED
    with answering(tmp_path, whole, monkeypatch) as asked:
        assert store.list_images() == [
            store.ListedImage("sha256:1", 5, ("a:1", "b:2")),
            store.ListedImage("sha256:2", 6, ()),
        ]
    assert asked[0].startswith(b"GET /images/json HTTP/1.0\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 500 Internal Server Error\r\n\r\n[]",
        b"HTTP/1.0 200 OK\r\n\r\n" + LISTED[:-20],
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe",
        b"not an engine at all, by no means",
        b"",
        b'HTTP/1.0 200 OK\r\n\r\n{"message": "no"}',
        b"HTTP/1.0 200 OK\r\n\r\n[1]",
        b"HTTP/1.0 200 OK\r\n\r\n" + LISTED.replace(b'"Size": 6', b'"Size": "6"'),
        b"HTTP/1.0 200 OK\r\n\r\n" + LISTED.replace(b'["a:1", "b:2"]', b'"a:1"'),
        b"HTTP/1.0 200 OK\r\n\r\n" + LISTED.replace(b'"Id"', b'"id"'),
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
    ],
    ids=[
        "refused",
        "cut",
        "not text",
        "something else",
        "nothing",
        "an object",
        "numbers",
        "a size of words",
        "a name",
        "no id",
        "deep",
    ],
)
def test_another_answer_leaves_it_to_the_library(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(tmp_path, answer, monkeypatch):
        assert store.list_images() is None


@pytest.mark.parametrize("said", [b"[]", b"7", b"null", b'{"Arch": 7}'])
def test_an_engine_that_does_not_say_what_it_is_leaves_it_to_the_library(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(tmp_path, b"HTTP/1.0 200 OK\r\n\r\n" + said, monkeypatch):
        assert store.read_architecture() == ""


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:9", "ssh://somewhere", "unix:///nowhere/engine.sock"])
def test_an_engine_elsewhere_is_the_librarys(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert store.list_images() is None
    assert store.read_architecture() == ""


@pytest.mark.parametrize("listed", [b'{"message": "no"}', b"[1]", b'[{"Id": 1, "Size": 1}]', b"null"])
def test_what_is_no_list_of_images_to_the_library_either_is_a_sentence(
    listed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Said(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = listed if "/images/json" in self.path else b'{"ApiVersion": "1.41", "Arch": "amd64"}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "somebody"

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    path = str(tmp_path / "engine.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with ThreadingUnixStreamServer(path, Said) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = CliRunner().invoke(build.main, ["build", "layer:root"])
        server.shutdown()
    assert result.exit_code == 1
    assert result.output.startswith("error: cannot list the images: what the docker engine answered is no list")
