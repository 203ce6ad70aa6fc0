"""Commands in pods: no output is lost that the engine sends together with the header of its answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker  # type: ignore[import-untyped]  # it carries no types
import pytest

from cluster import ClusterError, pods
from cluster.pods import FRAME, Kubelet

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: close\r\n\r\n"


def frames(*parts: tuple[int, bytes]) -> bytes:
    return b"".join(FRAME.pack(kind, len(data)) + data for kind, data in parts)


def reply(document: object) -> bytes:
    body = json.dumps(document).encode()
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % len(body)
        + body
    )


@contextmanager
def engine(path: Path, output: bytes, *codes: int | None) -> Iterator[Kubelet]:
    """Serve one command: its output in one piece with the header, then the exit codes, the last one for ever."""
    left = list(codes)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as request:
                    line, *headers = iter(request.readline, b"\r\n")
                    sizes = [int(each.split()[1]) for each in headers if each.lower().startswith(b"content-length:")]
                    request.read(*sizes) if sizes else b""
                    if line.split()[1].endswith(b"/start"):
                        connection.sendall(STREAM + output)
                    elif line.startswith(b"POST"):
                        connection.sendall(reply({"Id": "x"}))
                    else:
                        connection.sendall(reply({"ExitCode": left.pop(0) if len(left) > 1 else left[0]}))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = docker.DockerClient(base_url=f"unix://{path}", version="1.41")
        try:
            yield Kubelet(client, "test", path.parent)
        finally:
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_what_comes_together_with_the_header_is_not_lost(tmp_path: Path) -> None:
    output = frames((1, b"one\n"), (2, b"bad\n"), (1, b"two\n"))
    with engine(tmp_path / "engine", output, 7) as kubelet:
        assert kubelet.exec("pod", ["some", "command"]) == (7, "one\nbad\ntwo\n")


def test_an_exit_code_that_the_engine_knows_later_is_waited_for(tmp_path: Path) -> None:
    with engine(tmp_path / "engine", b"", None, None, 3) as kubelet:
        assert kubelet.exec("pod", ["some", "command"]) == (3, "")


def test_a_command_without_an_exit_code_did_not_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "EXIT_S", 0.2)
    with engine(tmp_path / "engine", b"", None) as kubelet, pytest.raises(ClusterError, match="no exit code"):
        kubelet.exec("pod", ["some", "command"])
