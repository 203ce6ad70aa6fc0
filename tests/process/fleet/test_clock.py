"""The machine's clock against those of the API server and of slurmctld."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from fleet import reconciler as loop
from fleet.act import api_client
from fleet.act import observer as looks
from fleet.policy import FleetSettings
from fleet.reconciler import Reconciler
from fleet.report.web import stats_pages
from tests.support.fleet_run import SLURM, server, settings
from tests.support.slurm_rest import Rest, nodes
from tests.support.watch_server import Server, until

__all__ = ["server", "settings"]
HOUR = 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_began", api_client._began)  # put back after each
    monkeypatch.setattr(loop, "AT_LEAST_S", 0.1)
    monkeypatch.setattr(looks, "CLOCK_S", 0.0)


def running(server: Server, settings: FleetSettings, steps: Callable[[Reconciler], list[Callable[[], bool]]]) -> None:
    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                for step in steps(fleet):
                    await until(step)
            finally:
                fleet.stop.set()
                await task

    asyncio.run(whole())


def stands(fleet: Reconciler) -> bool:
    return fleet.stats.notices["clock"] == 1


def test_a_clock_that_was_wrong_when_the_fleet_began_is_told_and_right_again_once_it_is_set(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + HOUR)
    monkeypatch.setattr(api_client, "_began", time.time() - time.monotonic())
    rest.answers, server.watches = (lambda method, path: nodes(SLURM)), server.hold

    def steps(fleet: Reconciler) -> list[Callable[[], bool]]:
        def told() -> bool:
            return stands(fleet) and fleet.api.clocks.why().startswith("the API server's clock is behind the fleet's")

        def mended() -> bool:
            monkeypatch.setattr(time, "time", real)
            asyncio.get_running_loop().create_task(fleet.cache.nodes.list())
            return not stands(fleet) and abs(api_client.steady() - real()) < api_client.MOST_SKEW_S

        return [told, lambda: 'clock_ahead_seconds{of="the API server"}' in metrics(fleet), mended]

    running(server, settings, steps)


def metrics(fleet: Reconciler) -> str:
    return stats_pages(fleet.stats, fleet.leader, fleet.cache, fleet.api).pages["/metrics"]()[1]


def test_a_slurmctld_of_another_hour_is_told_until_it_has_ours(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    ahead = HOUR

    def answers(method: str, path: str) -> tuple[int, bytes]:
        if path.endswith("/diag/"):
            now = {"set": True, "infinite": False, "number": int(time.time() + ahead)}
            return 200, json.dumps({"statistics": {"req_time": now}, "errors": []}).encode()
        return nodes(SLURM)

    rest.answers, server.watches = answers, server.hold

    def steps(fleet: Reconciler) -> list[Callable[[], bool]]:
        def mended() -> bool:
            nonlocal ahead
            ahead = 0.0
            return not stands(fleet)

        told = "slurmctld's clock is ahead of the fleet's by over 30 s"
        return [lambda: stands(fleet) and fleet.api.clocks.why() == told, mended]

    running(server, settings, steps)
