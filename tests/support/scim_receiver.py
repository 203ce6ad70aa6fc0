"""A SCIM receiver of a test's own, and an API server that holds Secrets alone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kubernetes_asyncio import client

from fleet.act.api_client import ApiClient
from fleet.scim.roster import Rules
from fleet.scim.server import Receiver, ScimSettings
from tests.support.ports import free_port

TOKEN = "scim-token-of-a-test-0123456789abcdef"
PEOPLE, MORE = "people.yaml", "scim.json"


class SecretServer:
    """Answers GET and PUT of Secrets as an API server does, also where the version is an old one."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.puts = 0
        # Called before a Secret is replaced, such as by a second writer.
        self.between: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                secret = server.secrets.get(self.path.rpartition("/")[2])
                self.answer(200 if secret else 404, secret or {"message": "not found"})

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.between()
                with server.lock:
                    name = self.path.rpartition("/")[2]
                    now = server.secrets[name]["metadata"]["resourceVersion"]
                    if body["metadata"]["resourceVersion"] != now:
                        self.answer(409, {"message": "the object has been modified"})
                        return
                    server.puts += 1
                    server.write(name, body["data"])
                    self.answer(200, server.secrets[name])

            def answer(self, status: int, body: object) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url, self.token = f"http://127.0.0.1:{self.http.server_port}", ""

    def write(self, name: str, data: dict[str, str]) -> None:
        before = self.secrets.get(name, {}).get("metadata", {}).get("resourceVersion", "0")
        metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(int(before) + 1)}
        self.secrets[name] = {"metadata": metadata, "data": data, "type": "Opaque"}

    def write_file(self, name: str, file: str, text: bytes) -> None:
        data = self.secrets.get(name, {}).get("data", {})
        self.write(name, data | {file: base64.b64encode(text).decode()})

    def file(self, name: str, file: str = PEOPLE) -> bytes:
        return base64.b64decode(self.secrets[name]["data"].get(file, ""))


class Answer:
    def __init__(self, status: int, headers: Any, text: bytes) -> None:
        self.status, self.headers, self.text = status, headers, text

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    def __repr__(self) -> str:
        return f"{self.status} {self.text.decode(errors='replace')[:500]}"


class Scim:
    """A receiver in a thread, and requests to it."""

    def __init__(self, url: str, token: str, folder: Path, *, namespace: str = "hpc", tls: Path | None = None) -> None:
        self.port, self.probes = free_port(), free_port()
        self.token_file = folder / "token"
        self.token_file.write_text(f"{TOKEN}\n")
        self.said: list[str] = []
        ports = (self.port, self.probes)
        settings = ScimSettings(namespace, "people", Rules("people", 100_000), self.token_file, tls, ports)
        self.receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        async def whole() -> None:
            where = client.Configuration(host=url)
            where.verify_ssl = False
            where.api_key = {"BearerToken": f"Bearer {token}"}
            api = ApiClient(client.ApiClient(where), namespace, "")
            self._loop = asyncio.get_running_loop()
            self.receiver = Receiver(api, settings, self.said.append)
            try:
                await self.receiver.run()
            finally:
                await api.close()

        self.thread = threading.Thread(target=lambda: asyncio.run(whole()), daemon=True)
        self.thread.start()

    def probe(self, page: str = "/readyz") -> Answer:
        return self._ask(HTTPConnection("127.0.0.1", self.probes, timeout=30), "GET", page, None, {})

    def ask(self, method: str, where: str, body: Any = None, *, token: str = TOKEN, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/scim+json"}
        sent |= {key.replace("_", "-"): value for key, value in headers.items()}
        return self._ask(HTTPConnection("127.0.0.1", self.port, timeout=60), method, where, data, sent)

    def _ask(
        self, http: HTTPConnection, method: str, where: str, data: bytes | None, headers: dict[str, str]
    ) -> Answer:
        with contextlib.closing(http):
            http.request(method, where if where.startswith("/") else f"/scim/v2/{where}", data, headers)
            reply = http.getresponse()
            return Answer(reply.status, reply.headers, reply.read())

    def user(self, user_name: str = "carol@lab.org", **more: Any) -> Answer:
        schemas = ["urn:ietf:params:scim:schemas:core:2.0:User"]
        return self.ask("POST", "Users", {"schemas": schemas, "userName": user_name, "active": True} | more)

    def group(self, name: str, *members: str, **more: Any) -> Answer:
        listed = [{"value": key} for key in members]
        return self.ask("POST", "Groups", {"displayName": name, "members": listed} | more)

    def patch(self, where: str, *operations: dict[str, Any], **headers: str) -> Answer:
        schemas = ["urn:ietf:params:scim:api:messages:2.0:PatchOp"]
        return self.ask("PATCH", where, {"schemas": schemas, "Operations": [*operations]}, **headers)

    def stop(self) -> None:
        if self._loop and self.receiver:
            self._loop.call_soon_threadsafe(self.receiver.stop.set)
        self.thread.join(30)


@contextlib.contextmanager
def serving(url: str, token: str, folder: Path, *, namespace: str = "hpc", tls: Path | None = None) -> Iterator[Scim]:
    made = Scim(url, token, folder, namespace=namespace, tls=tls)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                made.probe()
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield made
    finally:
        made.stop()
