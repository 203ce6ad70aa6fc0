"""The engine asked by hand: its answer as it is, and nothing where it gives another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from images.engine import look

LISTED = b'[{"Id": "sha256:1", "Size": 5, "RepoTags": ["a:1", "b:2"]}, {"Id": "sha256:2", "Size": 6, "RepoTags": null}]'


@contextmanager
def answering(directory: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """An engine that says this to whoever asks, once, in two pieces."""
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
        assert look.images() == [
            look.Present("sha256:1", 5, ("a:1", "b:2")),
            look.Present("sha256:2", 6, ()),
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
    ],
    ids=["refused", "cut", "not text", "something else", "nothing"],
)
def test_another_answer_leaves_it_to_the_library(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(tmp_path, answer, monkeypatch):
        assert look.images() is None


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:9", "ssh://somewhere", "unix:///nowhere/engine.sock"])
def test_an_engine_elsewhere_is_the_librarys(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert look.images() is None
    assert look.arch() == ""
