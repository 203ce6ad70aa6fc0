"""Kubernetes' side over a real connection: a watch that goes silent, a list that breaks off, an object that changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_asyncio import client

from fleet import FleetError
from fleet.act import api_client as adapter
from fleet.act import watch_cache as cache_module
from fleet.act.api_client import ApiClient, KubernetesError
from fleet.act.changes import apply_change
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Cordon, Evict, Free, HideOnNode, Protect, SeenVersions, ShowOnPod
from fleet.decide.causes import silent_for
from fleet.world.kubernetes import KubeCondition, KubernetesView
from fleet.world.slurm import Precondition
from fleet.world.snapshot import Unknown
from tests.support.watch_server import Query, Server, Write, node, page, until
from tests.waiting import PATIENCE


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.ended.set()
    made.http.shutdown()
    made.http.server_close()


SEEN = Precondition(drained=True, down=False, reason="", comment="")


def test_a_node_is_silent_for_as_long_as_it_was_seen_so_whatever_the_clocks_say(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own word of when it began is of two days ago; and somebody sets our clock an hour ahead."""
    item = node("n0")
    item["status"] = {
        "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-11-20T00:00:00Z"}]
    }
    server.lists, server.watches = (lambda query: page(item)), server.hold

    def silent(cache: WatchCache) -> float:
        world = cache.take_view()
        return -1.0 if isinstance(world, Unknown) else silent_for(world.nodes["n0"], time.time())

    async def whole() -> None:
        async with server.followed() as cache:
            await until(lambda: silent(cache) >= 0)
            assert silent(cache) < 60
            wall = time.time
            monkeypatch.setattr(time, "time", lambda: wall() + 3600)
            assert silent(cache) < 60
            before = silent(cache)
            await until(lambda: silent(cache) >= before + 0.1)

    asyncio.run(whole())


def known(cache: WatchCache) -> dict[str, bool]:
    """Cordoned or not, by name; nothing while nothing is known."""
    world = cache.world()
    return {name: one.cordoned for name, one in world.nodes.items()} if isinstance(world, KubernetesView) else {}


def test_what_changes_arrives_and_what_goes_goes(server: Server) -> None:
    def watches(query: Query, write: Write) -> None:
        if query["resourceVersion"] == "1":
            write({"type": "ADDED", "object": node("n1", 2)})
            write({"type": "MODIFIED", "object": node("n0", 3, cordoned=True)})
            write({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "4"}}})
            return  # the server ends a watch after its time; it goes on from where it was
        assert query["resourceVersion"] == "4"
        write({"type": "DELETED", "object": node("n1", 5)})
        write({"type": "MODIFIED", "object": {"metadata": {"name": "n0"}}})
        server.hold(query, write)

    server.watches = watches

    async def whole() -> None:
        async with server.followed() as cache:
            await until(lambda: "Node/n0" in cache.nodes.now.unread)
            assert known(cache) == {}, "what cannot be read is not there as it was"

    asyncio.run(whole())


def test_a_connection_that_goes_silent_is_not_a_world_in_which_nothing_happens(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "WATCH_S", 0)
    monkeypatch.setattr(adapter, "WITHIN_S", 0.3)
    monkeypatch.setattr(cache_module, "STALE_S", 1.0)
    server.watches = server.hold
    answers = True

    def lists(query: Query) -> dict[str, Any] | int:
        if not answers:
            server.ended.wait(60)
        return page(node("n0"))

    server.lists = lists

    async def whole() -> None:
        nonlocal answers
        async with server.followed() as cache:
            await until(lambda: known(cache) == {"n0": False})
            answers = False
            await until(lambda: isinstance(cache.world(), Unknown))
            world = cache.world()
            assert isinstance(world, Unknown)
            assert "nothing was heard of Nodes" in world.why

    asyncio.run(whole())


def test_a_list_that_breaks_off_changes_nothing(server: Server) -> None:
    broken = threading.Event()

    def lists(query: Query) -> dict[str, Any] | int:
        if not broken.is_set():
            return page(node("n0"))
        return 500 if "continue" in query else page(more="x")

    def watches(query: Query, write: Write) -> None:
        broken.set()
        write({"type": "ERROR", "object": {"code": 410, "message": "too old"}})

    server.lists, server.watches = lists, watches

    async def whole() -> None:
        async with server.followed() as cache:
            await until(lambda: "list Nodes" in cache.nodes.why)
            assert known(cache) == {"n0": False}

    asyncio.run(whole())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_refusal_whose_words_break_off_or_never_come_is_a_refusal(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may answer for an API server that is away; its broken answer must not end the fleet."""
    monkeypatch.setattr(adapter, "WITHIN_S", 3.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 1000\r\n\r\nthe backend is")
        if hangs:
            await reader.read()
        writer.close()

    async def whole() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            api = ApiClient(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")), "default", "slurm")
            try:
                async with asyncio.timeout(PATIENCE):
                    with pytest.raises(KubernetesError) as error:
                        await listed(api)
            finally:
                await api.close()
        assert error.value.status == 503

    async def listed(api: ApiClient) -> None:
        async for _ in api.list("Node"):
            pass

    asyncio.run(whole())


@pytest.mark.parametrize("status", [404, 409])
def test_an_object_that_is_no_longer_as_it_was_seen_is_not_changed(server: Server, status: int) -> None:
    server.changes = lambda method, path, body: status

    async def whole() -> None:
        async with server.api() as api:
            assert not await apply_change(api, Cordon("n0", "u", "7", "why"))
            assert not await apply_change(api, Evict("w0", "u", "7", "why", SEEN))
            assert not await apply_change(api, ShowOnPod("w0", "u", KubeCondition("t", "True")))

    asyncio.run(whole())
    bodies = [body for _, _, body in server.asked]
    assert bodies[0]["metadata"]["uid"] == bodies[2]["metadata"]["uid"] == "u"
    assert bodies[0]["metadata"]["resourceVersion"] == "7"
    assert bodies[1]["deleteOptions"] == {"preconditions": {"uid": "u", "resourceVersion": "7"}}


def test_what_is_shown_or_labelled_is_of_this_object_and_of_no_successor(server: Server) -> None:
    async def whole() -> None:
        async with server.api() as api:
            for act in (
                Free("w0", "u", "7", SEEN),
                Free("w0", "u", "7", None),
                Protect("w0", "u", "8"),
                HideOnNode("n0", "u", "t"),
            ):
                assert await apply_change(api, act)

    asyncio.run(whole())
    free, lost, protect, hide = (body for _, _, body in server.asked)
    assert free["metadata"] == {"uid": "u", "resourceVersion": "7", "labels": {"minivm.io/free": "true"}}
    assert lost["metadata"]["labels"] == {"minivm.io/free": "lost"}, "Slurm knows no such node"
    assert protect["metadata"] == {"uid": "u", "resourceVersion": "8", "labels": {"minivm.io/free": None}}
    assert hide == {"metadata": {"uid": "u"}, "status": {"conditions": [{"type": "t", "$patch": "delete"}]}}
    assert [path.rpartition("/")[2] for _, path, _ in server.asked] == ["w0", "w0", "w0", "status"]


@pytest.mark.parametrize(
    ("versions", "still"),
    [
        ({"w0": "7", "n0": "8"}, True),
        ({"w0": "9", "n0": "8"}, False),
        ({"w0": "7", "n0": "9"}, False),
        ({"w0": "7"}, False),
        ({"n0": "8"}, False),
    ],
)
def test_before_jobs_may_come_again_pod_and_node_are_asked_anew(
    server: Server, versions: dict[str, str], still: bool
) -> None:
    server.versions = versions

    async def whole() -> None:
        async with server.api() as api:
            assert await api.is_unchanged(SeenVersions("w0", "n0", "7", "8")) is still

    asyncio.run(whole())


def test_a_budget_that_says_not_yet_is_told(server: Server) -> None:
    server.changes = lambda method, path, body: 429

    async def whole() -> None:
        async with server.api() as api:
            with pytest.raises(FleetError, match="its PodDisruptionBudget says not yet"):
                await apply_change(api, Evict("w0", "u", "7", "why", SEEN))

    asyncio.run(whole())


def test_an_older_server_is_asked_in_its_own_version(server: Server) -> None:
    server.changes = lambda method, path, body: 400 if body["apiVersion"] == "policy/v1" else 201

    async def whole() -> None:
        async with server.api() as api:
            assert await apply_change(api, Evict("w0", "u", "7", "why", SEEN))

    asyncio.run(whole())
    assert [body["apiVersion"] for _, _, body in server.asked] == ["policy/v1", "policy/v1beta1"]
