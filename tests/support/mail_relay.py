"""A real SMTP server, a receiver of webhooks and a certificate, for tests of messages."""

from __future__ import annotations

import asyncio
import email
import http.server
import json
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any, ClassVar, cast

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

USER, PASSWORD = "slurm", "correct-horse"


def certificate(directory: Path, *names: str) -> tuple[Path, Path]:
    """Make a key and a self-signed certificate for the names, such as IP:127.0.0.1."""
    key, cert = directory / "key.pem", directory / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=relay"]
    made += ["-addext", f"subjectAltName={','.join(names)}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    return key, cert


def context(key: Path, cert: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(cert, key)
    return made


class Inbox:
    """Mails that the relay took, and its refusals by recipient: answers["bob@x"] = "550 no such user"."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], EmailMessage]] = []
        self.answers: dict[str, str] = {}
        self.port = 0
        self.is_away = False
        self.whole: list[bytes] = []  # every line that a scripted relay was sent

    async def handle_RCPT(self, _: SMTP, __: Session, envelope: Envelope, address: str, ___: Any) -> str:  # noqa: N802 (aiosmtpd's name)
        if self.is_away:
            return "421 away"
        if address in self.answers:
            return self.answers[address]
        envelope.rcpt_tos.append(address)
        return "250 fine"

    async def handle_DATA(self, _: SMTP, __: Session, envelope: Envelope) -> str:  # noqa: N802 (aiosmtpd's name)
        mail = email.message_from_bytes(cast(bytes, envelope.content), policy=default)
        self.mails.append((envelope.rcpt_tos, mail))
        return "250 queued as 42"

    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for _, mail in self.mails]

    def text(self, subject: str) -> str:
        (found,) = [mail for _, mail in self.mails if subject in str(mail["Subject"])]
        return str(found.get_content()).replace("\r\n", "\n")


def _authenticate(_: SMTP, __: Session, ___: Envelope, ____: str, data: object) -> AuthResult:
    good = LoginPassword(USER.encode(), PASSWORD.encode())
    return AuthResult(success=data == good, handled=False)


@contextmanager
def relay(
    *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None, smtps: bool = False
) -> Iterator[Inbox]:
    """Run a relay. With `tls` it wants STARTTLS and a password, with `smtps` TLS from the start."""
    inbox = Inbox()
    options: dict[str, Any] = {"hostname": "relay"}
    if tls is not None and not smtps:
        options |= {"tls_context": tls, "require_starttls": True, "authenticator": _authenticate, "auth_required": True}
    loop = asyncio.new_event_loop()
    start = loop.create_server(lambda: SMTP(inbox, loop=loop, **options), host, port, ssl=tls if smtps else None)
    server = loop.run_until_complete(start)
    inbox.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield inbox
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def scripted_relay(answers: Mapping[bytes, str], late: float = 0.0) -> Iterator[Inbox]:
    """Run a relay whose answers the test says by command, `.` for the whole mail: "" for none, "drop" to hang up."""
    inbox = Inbox()

    class Talk(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 relay\r\n")
            in_data = False
            for line in (raw.rstrip(b"\r\n") for raw in self.rfile):
                inbox.whole.append(line)
                if in_data and line != b".":
                    continue
                word = line.split(b" ")[0].upper()
                in_data = word == b"DATA"
                answer = answers.get(word, "354 go on" if in_data else "250 ok")
                if word == b".":
                    time.sleep(late)
                if answer == "drop":
                    return
                if answer:
                    self.wfile.write(f"{answer}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        inbox.port = server.server_address[1]
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield inbox
        server.shutdown()


class Hook(http.server.BaseHTTPRequestHandler):
    """Answers with `status` and keeps what was posted."""

    status = 200
    headers_out: ClassVar[dict[str, str]] = {}
    got: ClassVar[list[tuple[str, Any, str]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.path, body, self.headers.get("Authorization", "")))
        self.send_response(self.status)
        for name, value in self.headers_out.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(f"said of {self.path}".encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiver(
    status: int = 200,
    tls: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[tuple[str, type[Hook]]]:
    kind = type("HookOfTest", (Hook,), {"status": status, "headers_out": headers or {}, "got": []})
    with http.server.ThreadingHTTPServer((host, 0), kind) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{server.server_address[1]}", kind
        server.shutdown()
