"""Machines that look dead, asked over real connections; and what giving one up tells the API server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio import client

from fleet.act import observer
from fleet.act.api_client import ApiClient
from fleet.act.changes import apply_change
from fleet.decide.actions import Delete, Fence, Unfence
from fleet.policy import Policy
from fleet.world.kubernetes import FENCED, KubeCondition, KubeNode, KubePod, KubernetesView
from fleet.world.snapshot import DeathProof
from tests.fleet_world import stamp

TAINT = "node.kubernetes.io/out-of-service"
# Where connections are neither made nor refused: the queue of whoever listens is full, and nobody takes from it.
NOWHERE, *NOWHERE_ELSE = "127.0.0.9", "127.0.0.7", "127.0.0.8"


class ApiServer:
    """API server stand-in with one Node (tainted by another writer) and its lease; it records requests."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {
            "metadata": {"name": "n0", "uid": "u", "resourceVersion": "7"},
            "spec": {"taints": [{"key": "x", "effect": "NoExecute", "timeAdded": "2026-11-20T10:32:18Z"}]},
        }
        self.renewed: str | None = stamp(time.time() - 900)
        self.renewals = 1
        self.told: list[tuple[str, str, Any]] = []

    @asynccontextmanager
    async def api(self) -> AsyncIterator[ApiClient]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        api = ApiClient(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")), "default", "slurm")
        try:
            yield api
        finally:
            await api.close()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            self.told.append((request.method, request.path, await request.json()))
            return web.json_response({})
        if "/leases/" in request.path:
            assert request.path == "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n0"
            lease = {"metadata": {"resourceVersion": str(self.renewals)}, "spec": {"renewTime": self.renewed}}
            return web.json_response(lease, status=200 if self.renewed else 404)
        return web.json_response(self.node)


ELSEWHERE = observer.is_elsewhere


@pytest.fixture(autouse=True)
def one_machine_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "is_elsewhere", lambda address, server: bool(address))


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def nowhere() -> Iterator[tuple[str, int]]:
    with contextlib.ExitStack() as stack:
        for host, port in ((NOWHERE, 10250), (NOWHERE, 6818), *((host, 10250) for host in NOWHERE_ELSE)):
            server = stack.enter_context(socket.create_server((host, port), backlog=0))
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(server.getsockname())
        yield NOWHERE, 10250


def world(kubelet: tuple[str, int], witness: tuple[str, int], pod: str = NOWHERE) -> KubernetesView:
    silent = {"Ready": KubeCondition("Ready", "Unknown", since=time.time() - 900)}
    well = {"Ready": KubeCondition("Ready", "True")}
    nodes = {
        "n0": KubeNode("n0", "u", "7", address=kubelet[0], port=kubelet[1], conditions=silent),
        "n1": KubeNode("n1", "v", "8", address=witness[0], port=witness[1], conditions=well),
    }
    return KubernetesView(nodes, {"w0": KubePod("w0", "p", node="n0", address=pod, component="worker")})


def proved(server: ApiServer, seen: KubernetesView) -> DeathProof:
    async def whole() -> DeathProof:
        async with server.api() as api:
            return (await observer.prove(api, seen, Policy()))["n0"]

    return asyncio.run(whole())


def test_a_machine_is_asked_in_every_way(
    listening: int, nowhere: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "WITHIN_S", 1.0)
    server, here = ApiServer(), ("127.0.0.1", listening)
    found = proved(server, world(nowhere, here))
    assert (found.kubelet, found.pods, found.witness) == (False, (), True)
    assert found.lease_age is not None
    assert found.lease_age >= 899
    assert proved(server, world(here, here)).kubelet is True
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = unused.getsockname()
    assert proved(server, world(refused, here)).kubelet is True, "somebody has refused"
    assert proved(server, world(("", 10250), here)).kubelet is None
    assert proved(server, world(nowhere, here, pod="127.0.0.1")).pods == ("w0",)
    assert not proved(server, world(nowhere, nowhere)).witness
    server.renewed = None
    assert proved(server, world(nowhere, here)).lease_age is None


@pytest.mark.parametrize(
    "nonsense",
    [("127.0.0.1", 70000), ("127.0.0.1", -1), (".a..b", 10250), ("n0\0", 10250), ("n" * 300, 10250), ("::1%\0", 10250)],
)
def test_a_kubelets_words_for_where_it_is_may_be_any_and_prove_nothing(
    listening: int, nowhere: tuple[str, int], nonsense: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked for each machine that looks dead: of that one itself, and of those that are well as witnesses."""
    monkeypatch.setattr(observer, "WITHIN_S", 1.0)
    server, here = ApiServer(), ("127.0.0.1", listening)
    assert proved(server, world(nonsense, here)).kubelet is None
    assert not proved(server, world(nowhere, nonsense)).witness
    assert proved(server, world(nowhere, here, pod=nonsense[0] if nonsense[1] == 10250 else "")).pods == ()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(("192.0.2.77", 9))
        return str(way.getsockname()[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "169.254.169.254", "fe80::1",
                                     "224.0.0.1", "10.96.0.1", "", "n1", "own", "2001:db8::1%a\0"])  # fmt: skip
def test_a_witness_is_another_machine_and_not_the_api_server(address: str) -> None:
    """A kubelet says by itself where it is."""
    assert not ELSEWHERE(own_address() if address == "own" else address, "10.96.0.1")


def test_another_machine_may_be_a_witness() -> None:
    assert ELSEWHERE("192.0.2.77", "10.96.0.1")


def test_of_several_witnesses_most_must_answer(
    listening: int, nowhere: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A witness kubelet that lies about its place must not speak for everyone's network."""
    monkeypatch.setattr(observer, "WITHIN_S", 1.0)
    seen = world(nowhere, ("127.0.0.1", listening))
    liar = seen.nodes["n1"]
    others = {host: replace(liar, name=host, address=host, port=10250) for host in NOWHERE_ELSE}
    assert not proved(ApiServer(), replace(seen, nodes={**seen.nodes, **others})).witness
    same = {"n2": replace(liar, name="n2")}
    assert not proved(ApiServer(), replace(seen, nodes={**seen.nodes, **same})).witness, "two are at one address"


def test_a_lease_is_as_old_as_it_was_seen_unchanged_whatever_its_kubelets_clock_says() -> None:
    server = ApiServer()

    async def whole() -> None:
        leases = observer.LeaseAges()
        async with server.api() as api:
            first = await leases.age(api, "n0")
            assert first is not None and first < 60, "its clock is behind"
            await asyncio.sleep(0.01)
            later = await leases.age(api, "n0")
            assert later is not None and later > first
            server.renewals += 1
            assert await leases.age(api, "n0") == 0, "and it is renewed"
            server.renewed = stamp(time.time() + 3600)
            await asyncio.sleep(0.01)
            ahead = await leases.age(api, "n0")
            assert ahead is not None and ahead > 0, "its clock was ahead"

    asyncio.run(whole())


def test_leases_are_followed_from_the_first_silence_on(nowhere: tuple[str, int]) -> None:
    """Not from when a machine looks dead: that would be twice as long."""
    server, seen = ApiServer(), world(nowhere, nowhere)
    silent = {"Ready": KubeCondition("Ready", "Unknown", since=time.time() - 1)}
    seen = replace(seen, nodes={**seen.nodes, "n0": replace(seen.nodes["n0"], conditions=silent)})

    async def whole() -> None:
        leases = observer.LeaseAges()
        async with server.api() as api:
            assert await observer.prove(api, seen, Policy(), leases) == {}
            await asyncio.sleep(0.01)
            age = await leases.age(api, "n0")
            assert age is not None and age >= 0.01
            await observer.prove(api, replace(seen, nodes={"n1": seen.nodes["n1"]}), Policy(), leases)
            assert await leases.age(api, "n0") == 0, "what is not silent any more is not remembered"

    asyncio.run(whole())


def test_a_machine_that_is_given_up_and_taken_back_keeps_the_taints_of_others() -> None:
    server = ApiServer()
    others = server.node["spec"]["taints"]

    async def whole() -> None:
        async with server.api() as api:
            assert await apply_change(api, Fence("n0", "u", "7", "why"))
            server.node["spec"] = server.told[-1][2]["spec"]
            assert await apply_change(api, Unfence("n0", "u", "7"))
            for late in (Fence("n0", "u", "6", "why"), Fence("n0", "v", "7", "why"), Unfence("n0", "u", "6")):
                assert not await apply_change(api, late)

    asyncio.run(whole())
    (_, _, fenced), (_, _, back) = server.told
    assert fenced["spec"]["taints"] == [*others, {"key": TAINT, "value": "nodeshutdown", "effect": "NoExecute"}]
    words = {"labels": {FENCED: "true"}, "annotations": {"minivm.io/fenced": "why"}}
    assert fenced["metadata"] == {"uid": "u", "resourceVersion": "7", **words}
    assert back["spec"]["taints"] == others
    assert (back["metadata"]["labels"], back["metadata"]["annotations"]) == ({FENCED: None}, {"minivm.io/fenced": None})


def test_a_pod_is_deleted_by_force_only_while_its_node_is_as_it_was_seen() -> None:
    server = ApiServer()

    async def whole() -> None:
        async with server.api() as api:
            assert await apply_change(api, Delete("w0", "p", "n0", "7"))
            assert not await apply_change(api, Delete("w0", "p", "n0", "6"))

    asyncio.run(whole())
    ((method, path, body),) = server.told
    assert (method, path) == ("DELETE", "/api/v1/namespaces/default/pods/w0")
    assert body == {"gracePeriodSeconds": 0, "preconditions": {"uid": "p"}}
