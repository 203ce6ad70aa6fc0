"""An API server of known answers, for tests of the fleet's watches."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time as wall
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes_asyncio import client

from fleet.act.api_client import ApiClient
from fleet.act.watch_cache import WatchCache
from tests.waiting import PATIENCE

Query = dict[str, str]
Write = Callable[[object], None]


def node(name: str, version: int = 1, cordoned: bool = False) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"unschedulable": cordoned}}


def page(*items: object, more: str = "") -> dict[str, Any]:
    return {"items": items, "metadata": {"resourceVersion": "1", "continue": more}}


class Server:
    """Lists and watches of Nodes as a test says; pods that stay."""

    def __init__(self) -> None:
        self.lists: Callable[[Query], dict[str, Any] | int] = lambda query: page(node("n0"))
        self.watches: Callable[[Query, Write], None] = lambda query, write: None
        self.changes: Callable[[str, str, Any], int] = lambda method, path, body: 200
        self.pods: list[object] = []
        self.versions: dict[str, str] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.ended = threading.Event()
        self.clock = wall  # its own, whatever a test sets ours to
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                where = urlsplit(self.path)
                query = {key: value[0] for key, value in parse_qs(where.query).items()}
                pods = where.path.endswith("/pods")
                if "watch" in query:
                    self.send_response(200)
                    self.end_headers()
                    (server.hold if pods else server.watches)(query, self.write)
                    return
                if not where.path.endswith(("/pods", "/nodes")):
                    version = server.versions.get(where.path.rpartition("/")[2])
                    self.answer(200 if version else 404, {"metadata": {"resourceVersion": version}})
                    return
                answer = page(*server.pods) if pods else server.lists(query)
                self.answer(answer if isinstance(answer, int) else 200, answer)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.command, self.path, body))
                status = server.changes(self.command, self.path, body)
                self.answer(status, {"message": "no"} if status >= 300 else {})

            do_PATCH = do_POST

            def answer(self, status: int, body: object) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.write(body)

            def write(self, body: object) -> None:
                self.wfile.write(json.dumps(body).encode() + b"\n")
                self.wfile.flush()

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(server.clock())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def hold(self, query: Query, write: Write) -> None:
        self.ended.wait(60)

    @asynccontextmanager
    async def api(self) -> AsyncIterator[ApiClient]:
        where = client.Configuration(host=f"http://127.0.0.1:{self.http.server_port}")
        api = ApiClient(client.ApiClient(where), "default", "slurm")
        try:
            yield api
        finally:
            await api.close()

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[WatchCache]:
        async with self.api() as api:
            cache = WatchCache(api)
            tasks = [asyncio.create_task(one.follow()) for one in (cache.nodes, cache.pods)]
            try:
                yield cache
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not look():
            await asyncio.sleep(0.01)
