"""What is done while Slurm is asked, and what whoever waits for the Lease does meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from fleet.act import run as loop
from fleet.act.run import Fleet
from fleet.settings import Settings
from tests.process.fleet.test_cache import Query, Server, Write, node, page, until
from tests.process.fleet.test_run import POD, SLURM, server, settings
from tests.process.fleet.test_slurm_rest import Rest, nodes

__all__ = ["server", "settings"]
MANY = 5


def pod(number: int) -> dict[str, object]:
    return {
        **POD,
        "metadata": {**POD["metadata"], "name": f"w{number}", "uid": f"u{number}"},
        "spec": {"nodeName": f"n{number}"},
    }


def test_who_answers_one_hurried_drain_with_an_error_is_not_asked_for_the_others(
    server: Server, rest: Rest, settings: Settings
) -> None:
    """Each may take its whole deadline to fail, and until the last one has nobody looks at anything else."""
    ends, slow = threading.Event(), threading.Event()
    refused: list[str] = []
    looks = 0

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal looks
        looks += "update_time" in path
        if "update_time" in path and looks > 3 and not refused:
            slow.set()
            ends.wait(60)
        elif method == "GET" and "/node/" in path:
            if not ends.is_set():
                refused.append(path)
            return 500, json.dumps({"errors": [{"error": "no"}]}).encode()
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(MANY)))

    def watches(query: Query, write: Write) -> None:
        slow.wait(60)
        for number in range(MANY):
            write({"type": "MODIFIED", "object": node(f"n{number}", 2, cordoned=True)})
        server.hold(query, write)

    server.pods = [pod(number) for number in range(MANY)]
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(*(node(f"n{number}") for number in range(MANY)))

    async def whole() -> set[str]:
        async with server.api() as api:
            fleet = Fleet(settings, api, lambda words: None)
            hurry, hurries = fleet._hurry, 0

            async def counted() -> None:
                nonlocal hurries
                await hurry()
                hurries += 1

            fleet._hurry = counted  # type: ignore[method-assign]
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: hurries >= 1 and bool(refused))
                return set(fleet._hurried or ())
            finally:
                ends.set()
                fleet.stop.set()
                await task

    tried = asyncio.run(whole())
    assert len(tried) == len(refused) == 1


class Waits:
    """For a Lease that another one has."""

    heard = True

    def holds(self) -> bool:
        return False

    async def keep(self) -> None:
        return


def test_who_waits_for_the_lease_reads_the_policy_anew(
    server: Server, rest: Rest, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page shows it, and from the first moment that it acts it holds: a mistake is told before that."""
    monkeypatch.setattr(loop, "AT_LEAST_S", 0.05)
    server.watches = server.hold
    said: list[str] = []
    settings.policy.write_text(json.dumps({"changes": 7}))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Fleet(settings, api, said.append)
            fleet.leader = Waits()
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: fleet.policy.changes == 7)
                settings.policy.write_text(json.dumps({"chnges": 8}))
                await until(lambda: bool(said))
                assert fleet.policy.changes == 7, "the last good one stays"
            finally:
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert "chnges" in said[0]
    assert not rest.asked, "and nothing is asked of Slurm"
