"""The API server's side of a pod's account: real TLS on loopback, a token, and whatever handler a test brings."""

from __future__ import annotations

import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "t0ken"


def serve(account: Path, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """`account` becomes what a pod has mounted: ca.crt and token."""
    # An authority and what it signed, as a cluster has them.
    authority = _certificate(account, "ca", "-subj", "/CN=authority")
    more = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-CA")
    signed = _certificate(account, "tls", *more, *authority)
    (account / "token").write_text(f"{TOKEN}\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed[0], signed[2])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _certificate(folder: Path, name: str, *more: str) -> tuple[str, str, str]:
    """Certificate and key, in openssl's words for an authority: FILE -CAkey FILE."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    command = [*request.split(), *more, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), "-CAkey", str(key)
