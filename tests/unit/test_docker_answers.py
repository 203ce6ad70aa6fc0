"""Answers of commands in containers, which an engine may send together with the header of its response."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from docker.api.client import APIClient  # type: ignore[import-untyped]  # it carries no types

from cluster.pods import FRAME
from tests.support.docker_answers import read_whole

HEAD = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\n\r\n"


def test_what_comes_together_with_the_header_is_not_lost(tmp_path: Path) -> None:
    read_whole()
    frames = b"".join(
        FRAME.pack(kind, len(data)) + data for kind, data in ((1, b"one\n"), (2, b"bad\n"), (1, b"two\n"))
    )
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "engine"))
        engine.listen()

        def answer() -> None:
            for _ in range(2):
                connection, _ = engine.accept()
                with connection, connection.makefile("rb") as request:
                    lines = list(iter(request.readline, b"\r\n"))
                    request.read(next(int(line.split()[1]) for line in lines if line.startswith(b"Content-Length:")))
                    connection.sendall(HEAD + frames)

        threading.Thread(target=answer, daemon=True).start()
        client = APIClient(base_url=f"unix://{tmp_path}/engine", version="1.41")
        try:
            assert client.exec_start("x", demux=True) == (b"one\ntwo\n", b"bad\n")
            assert client.exec_start("x") == b"one\nbad\ntwo\n"
        finally:
            client.close()
