"""The fleet's port: its probes and metrics over a real socket, before strangers who do not ask as http does."""

from __future__ import annotations

import asyncio

import pytest

from fleet import FleetError
from fleet.decide.actions import Notice
from fleet.report import web as adapter
from fleet.report.web import HANGS_S, HttpServer, LoopStats
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown
from tests.support.fleet_pages import asked
from tests.waiting import PATIENCE

GIVEN = {"/livez": lambda: (200, "ok\n"), "/readyz": lambda: (503, "not yet\n")}


def answers(*requests: bytes) -> list[bytes]:
    async def whole() -> list[bytes]:
        async with await HttpServer(GIVEN).serve("127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return [await asked(port, request) for request in requests]

    return asyncio.run(whole())


def test_it_answers_what_it_has_and_nothing_else() -> None:
    found = answers(
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /livez HTTP/1.1\r\n\r\n", b"GET /readyz?x=1 HTTP/1.1\r\n\r\n",
        b"GET /../livez HTTP/1.1\r\n\r\n", b"POST /livez HTTP/1.1\r\n\r\n", b"\xff\xff\r\n\r\n",
    )  # fmt: skip
    assert [int(one.split()[1]) for one in found] == [200, 200, 503, 404, 405, 405]
    assert found[0].endswith(b"\r\n\r\nok\n") and found[1].endswith(b"\r\n\r\n")


def test_a_stranger_who_says_nothing_or_too_much_keeps_nobody_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "WITHIN_S", 3.0)

    async def whole() -> None:
        async with await HttpServer(GIVEN).serve("127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(adapter.MOST - 1)]
            assert await asked(port, b"GET /" + b"x" * (1 << 20)) == b""
            assert b"ok" in await asked(port, b"GET /livez HTTP/1.1\r\n\r\n")
            # Whoever sends nothing is sent away, and his place is free.
            for reader, writer in silent:
                async with asyncio.timeout(PATIENCE):
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(whole())


def test_strangers_who_say_nothing_again_and_again_keep_nobody_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that is not answered starts the fleet anew."""
    monkeypatch.setattr(adapter, "WITHIN_S", 60.0)

    async def whole() -> None:
        async with await HttpServer(GIVEN).serve("127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * adapter.MOST)]
            assert b"ok" in await asked(port, b"GET /livez HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                assert await silent[0][0].read() == b"", "the first one was sent away for that"
            for _, writer in silent:
                writer.close()

    asyncio.run(whole())


def test_a_port_that_is_taken_is_a_sentence() -> None:
    async def whole() -> None:
        async with await HttpServer(GIVEN).serve("127.0.0.1", 0) as server:
            with pytest.raises(FleetError, match="cannot listen for the kubelet"):
                await HttpServer(GIVEN).serve("127.0.0.1", server.sockets[0].getsockname()[1])

    asyncio.run(whole())


def test_what_it_has_seen_is_told_to_the_kubelet_and_to_prometheus() -> None:
    seen = LoopStats(last_pass=100.0)
    assert seen.alive(100.0 + HANGS_S - 1)[0] == 200
    assert seen.alive(100.0 + HANGS_S + 1)[0] == 503
    assert seen.ready() == (503, "Kubernetes is not known: not asked yet\n")
    seen.kubernetes = ""
    assert seen.ready()[0] == 503, "without the Lease it is not known whether it may act"
    seen.lease_known = True
    assert seen.ready() == (200, "waits for the Lease\n")
    seen.leader = True
    seen.update(FleetSnapshot(KubernetesView(), Unknown("no answer")), (Notice("Slurm", "unknown", "no answer"),))
    seen.done["drain"] += 2
    assert seen.ready()[0] == 200, "another fleet would not bring the controller back"
    text = seen.metrics()
    assert 'minivm_fleet_known{side="slurm"} 0' in text
    assert 'minivm_fleet_known{side="kubernetes"} 1' in text
    assert 'minivm_fleet_changes_total{action="drain"} 2' in text
    assert 'minivm_fleet_stands{kind="unknown"} 1' in text
    seen.update(FleetSnapshot(KubernetesView(), SlurmView()), ())
    assert 'minivm_fleet_known{side="slurm"} 1' in seen.metrics()
