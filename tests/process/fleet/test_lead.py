"""The Lease over a real connection: taken, renewed, given back, and lost where the server says nothing any more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes_asyncio import client

from fleet.act import leader_election
from fleet.act import leader_election as adapter
from fleet.act.api_client import ApiClient
from fleet.act.leader_election import LeaderElection
from tests.support.watch_server import until


class Server:
    """Server with one Lease and the API server's rule: a write names the version that it changes."""

    def __init__(self) -> None:
        self.item: dict[str, Any] = {"metadata": {"name": "fleet", "resourceVersion": "1"}}
        self.lock = threading.Lock()
        self.silent = threading.Event()
        self.there = True
        self.ended = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200 if server.there else 404, server.item if server.there else {"message": "not found"})

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    version = server.item["metadata"]["resourceVersion"]
                    if body["metadata"]["resourceVersion"] != version:
                        return self.answer(409, {"message": "the object has been modified"})
                    body["metadata"]["resourceVersion"] = str(int(version) + 1)
                    server.item = body
                return self.answer(200, body)

            def answer(self, status: int, body: object) -> None:
                if server.silent.is_set():
                    server.ended.wait(60)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def holder(self) -> str:
        return str(self.item.get("spec", {}).get("holderIdentity", ""))

    @asynccontextmanager
    async def fleet(self, me: str, said: list[str]) -> AsyncIterator[LeaderElection]:
        where = client.Configuration(host=f"http://127.0.0.1:{self.http.server_port}")
        api = ApiClient(client.ApiClient(where), "default", "slurm")
        one = LeaderElection(api, "fleet", me, said.append, lambda: None)
        task = asyncio.create_task(one.keep())
        try:
            yield one
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await api.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(leader_election, "RENEW_S", 0.05)
    made = Server()
    yield made
    made.ended.set()
    made.http.shutdown()
    made.http.server_close()


def test_of_two_one_acts_and_when_it_ends_the_other_follows_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is given back, and not waited for.
    monkeypatch.setattr(leader_election, "LASTS_S", 1e9)
    said: list[str] = []

    async def whole() -> None:
        async with server.fleet("b", said) as second:
            await until(second.holds)
            async with server.fleet("a", said) as first:
                await until(lambda: first.lease_known)
                assert second.holds() and not first.holds()
                assert server.holder == "b"
            assert server.holder == "b", "whoever does not hold it gives nothing back"
            async with server.fleet("c", said) as third:
                await until(lambda: third.lease_known)
                server.item["spec"]["holderIdentity"] = ""
                server.item["metadata"]["resourceVersion"] = "1000"
                # Somebody else's hand: one of the two takes it, and the other sees it.
                await until(lambda: second.holds() != third.holds())
        assert server.holder == ""
        async with server.fleet("d", said) as fourth:
            await until(fourth.holds)

    asyncio.run(whole())


def test_one_that_was_killed_is_followed_when_its_lease_has_stood_still(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_election, "LASTS_S", 0.6)
    server.item["spec"] = {"holderIdentity": "dead", "renewTime": "2099-01-01T00:00:00.000000Z", "leaseTransitions": 3}

    async def whole() -> None:
        async with server.fleet("a", []) as one:
            await until(one.holds)
            assert server.item["spec"]["leaseTransitions"] == 4

    asyncio.run(whole())


def test_a_holder_whose_server_goes_silent_stops_by_itself(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "HOLDS_S", 1.5)
    monkeypatch.setattr(adapter, "WITHIN_S", 0.3)
    said: list[str] = []

    async def whole() -> None:
        async with server.fleet("a", said) as one:
            await until(one.holds)
            server.silent.set()
            await until(lambda: not one.holds())
            await until(lambda: "a is no longer the leader" in said)
            assert server.holder == "a", "nobody has taken it: it stopped without being told"
            server.silent.clear()
            await until(one.holds)

    asyncio.run(whole())
    assert "no answer about the Lease within 0.3 s" in said


def test_a_lease_that_is_not_there_is_nobodys_and_is_told_once(server: Server) -> None:
    server.there = False
    said: list[str] = []

    async def whole() -> None:
        async with server.fleet("a", said) as one:
            await until(lambda: bool(said))
            for _ in range(5):
                await asyncio.sleep(leader_election.RENEW_S)
            assert not one.holds() and not one.lease_known

    asyncio.run(whole())
    assert said == ["cannot hold the Lease fleet: 404 not found"]
