"""The webhook listener against strangers: it answers each at once or hangs up, and goes on."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gitsync.cycle import webhook
from gitsync.errors import GitsyncError
from gitsync.settings import content_length, split_address
from tests.waiting import PATIENCE, until


@dataclass
class Served:
    port: int
    pokes: list[int] = field(default_factory=list)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def ask(self, request: bytes) -> bytes:
        with self.connect() as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def push(self) -> bytes:
        signature = hmac.new(b"s3cret", b"{}", hashlib.sha256).hexdigest().encode()
        head = b"POST / HTTP/1.1\r\nContent-Length: 2\r\nX-Hub-Signature-256: sha256=" + signature
        return self.ask(head + b"\r\n\r\n{}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    made = Served(0)
    with webhook.Listener(("127.0.0.1", 0), webhook.make_handler(secret, lambda: made.pokes.append(1))) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("length", ["\u00b2", "-1", "", "1e3", "9" * 5000, "0x10", " "])
def test_a_length_that_is_no_number_is_refused_without_a_traceback(
    served: Served, capfd: pytest.CaptureFixture[str], length: str
) -> None:
    request = f"POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")
    assert served.ask(request).startswith(b"HTTP/1.0 413 ")
    assert served.push().startswith(b"HTTP/1.0 202 ")
    assert "Traceback" not in capfd.readouterr().err


def test_connections_that_send_nothing_keep_no_push_out(served: Served) -> None:
    idle = [served.connect() for _ in range(3 * webhook.MOST)]
    try:
        assert served.push().startswith(b"HTTP/1.0 202 ")
        assert served.pokes == [1]
    finally:
        for connection in idle:
            connection.close()


def test_a_body_that_comes_byte_by_byte_holds_nothing_up_and_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 3.0)
    with served.connect() as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        assert served.push().startswith(b"HTTP/1.0 202 "), "beside it"

        def is_hung_up() -> bool:
            try:
                slow.sendall(b"x")
            except OSError:
                return True
            return False

        until(is_hung_up, "the listener hangs up")
    assert served.pokes == [1]


def test_what_content_length_may_be() -> None:
    assert content_length("0", 5) == 0
    assert content_length("5", 5) == 5
    assert content_length("6", 5) is None


def test_a_port_that_is_no_number_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(GitsyncError, match="is not host:port"):
        split_address("127.0.0.1:\u00b2", "MINIVM_GITSYNC_WEBHOOK")
