"""Periodic reads of Slurm between a real server's answers: an unreadable part stays reported."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fleet.act import observer as adapter
from fleet.act.observer import Observer
from fleet.policy import Policy
from fleet.world.guests import Guest
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from tests.support.slurm_rest import Answer, Rest, nodes
from tests.support.watch_server import Server

SLURM = {"name": "w0", "state": ["IDLE"], "reason": "", "comment": "", "alloc_cpus": 0}
LATER = {"name": "later", "node_list": "w[0-9999999]"}
# One of another namespace waits for a machine: who is promised one must be known.
WAITS, QUIET = KubernetesView(guests=(Guest("llm/a", waits=True),)), KubernetesView(guests=())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.ended.set()
    made.http.shutdown()
    made.http.server_close()


@pytest.mark.parametrize("refused", [False, True])
def test_what_cannot_be_read_is_told_until_it_is_asked_for_again_or_needed_no_more(
    server: Server, rest: Rest, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: tuple[int, dict[str, Any]] = (
        (500, {"errors": [{"error": "x"}]}) if refused else (200, {"reservations": [LATER]})
    )
    status, said = bad

    def answers(method: str, path: str) -> Answer:
        if "reservations" in path:
            return status, json.dumps(said).encode()
        return (200, b'{"jobs": []}') if "/jobs/" in path else nodes(SLURM)

    rest.answers = answers

    async def whole() -> None:
        nonlocal status, said
        async with server.api() as api:
            look = Observer(api, rest.client, Policy)

            async def doubts(kubernetes: KubernetesView) -> Mapping[str, str]:
                found = await look.slurm(kubernetes)
                assert isinstance(found, SlurmView) and [*found.nodes] == ["w0"]
                return found.doubts

            def asked() -> int:
                return sum("reservations" in path for _, path, _ in rest.asked)

            name = "jobs" if refused else "reservation later"
            assert [*await doubts(WAITS)] == [name]
            assert [*await doubts(WAITS)] == [name] and asked() == 1, "it is not asked for at each look"
            assert not await doubts(QUIET), "nobody needs it"
            assert not await doubts(WAITS), "and it is not known again yet"
            monkeypatch.setattr(adapter, "CLAIMS_S", 0.0)
            assert [*await doubts(WAITS)] == [name]
            status, said = 200, {"reservations": [{**LATER, "node_list": "w1"}]}
            assert not await doubts(WAITS), "it is mended"

    asyncio.run(whole())
