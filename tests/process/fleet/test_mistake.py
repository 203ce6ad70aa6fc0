"""The loop, where a mistake of the fleet's own keeps it from deciding."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from fleet.decide import decide as decide_module
from fleet.decide.decide import decide
from fleet.policy import FleetSettings
from fleet.reconciler import Reconciler
from fleet.world.kubernetes import KubernetesView
from tests.support.fleet_pages import asked
from tests.support.fleet_run import POD, SLURM, server, settings
from tests.support.ports import free_port
from tests.support.slurm_rest import Rest, nodes
from tests.support.watch_server import Query, Server, Write, node, page, until

__all__ = ["server", "settings"]


def test_where_it_cannot_decide_it_lives_says_so_does_nothing_and_goes_on_with_another_world(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that exits on the error would be restarted before the same world."""
    port = free_port()
    settings = replace(settings, http=("127.0.0.1", port))
    rest.answers, tried = (lambda method, path: nodes(SLURM)), 0
    shown, well = threading.Event(), threading.Event()
    own = {"name": "slurm-fleet-x", "uid": "f", "labels": {"app.kubernetes.io/component": "fleet"}}
    server.pods = [POD, {"metadata": own, "spec": {}}]

    def item(version: int, *, cordoned: bool = False, bad: bool = False) -> dict[str, Any]:
        return {**node("n0", version, cordoned=cordoned), "status": {"nodeInfo": {"bootID": "bad" if bad else "b"}}}

    now = item(1)

    def breaks(world: Any, *given: Any) -> Any:
        nonlocal tried
        if isinstance(world.kubernetes, KubernetesView) and world.kubernetes.nodes["n0"].boot == "bad":
            tried += 1
            raise RecursionError("maximum recursion depth exceeded")
        return decide(world, *given)

    def watches(query: Query, write: Write) -> None:
        nonlocal now
        now = item(2, bad=True)
        write({"type": "MODIFIED", "object": now})
        asyncio.run(until(lambda: tried >= 2))
        now = item(3, bad=True, cordoned=True)
        write({"type": "MODIFIED", "object": now})
        asyncio.run(until(lambda: tried >= 3))
        shown.set()
        well.wait(60)
        now = item(4, cordoned=True)
        write({"type": "MODIFIED", "object": now})
        server.hold(query, write)

    monkeypatch.setattr(decide_module, "decide", breaks)
    server.watches, server.lists = watches, lambda query: page(now)
    said: list[str] = []

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, said.append)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: task.done() or shown.is_set())
                assert not task.done()
                turned = fleet.stats.last_pass
                assert (await fleet.plan()).notices[0].kind == "mistake"
                assert (await fleet.report())["holds"][0]["kind"] == "mistake"
                ready, alive, numbers = [
                    await asked(port, b"GET %s HTTP/1.1\r\n\r\n" % path)
                    for path in (b"/readyz", b"/livez", b"/metrics")
                ]
                assert b" 503 " in ready.splitlines()[0] and b"nothing is decided: RecursionError" in ready
                assert b" 200 " in alive.splitlines()[0], "started again it would do no better"
                assert b"minivm_fleet_decided 0" in numbers and b'minivm_fleet_stands{kind="mistake"} 1' in numbers
                await until(lambda: fleet.stats.last_pass > turned)
                assert not any(method == "POST" for method, _, _ in rest.asked), "nothing is done"
                well.set()
                await until(lambda: any(method == "POST" for method, _, _ in rest.asked))
                await until(lambda: not fleet.stats.mistake)
            finally:
                well.set()
                fleet.stop.set()
                await asyncio.wait([task])

    asyncio.run(whole())
    assert sum(words.startswith("fleet: nothing is decided: RecursionError") for words in said) == 1
    assert sum("in breaks" in words for words in said) == 1, "where it was, once"
    events = [body for _, path, body in server.asked if path.endswith("/events")]
    assert [one["involvedObject"]["name"] for one in events if one["reason"] == "Mistake"] == ["slurm-fleet-x"]
