"""Work of the fleet while a Slurm request is pending, and of the replica that waits for the Lease."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleet import reconciler
from fleet import reconciler as loop
from fleet.decide import drain
from fleet.decide.actions import Drain
from fleet.policy import FleetSettings
from fleet.reconciler import AT_ONCE, Reconciler
from fleet.world.slurm import parse_nodes
from fleet.world.snapshot import Worker
from tests.support.fleet_run import POD, SLURM, server, settings
from tests.support.slurm_rest import Rest, nodes
from tests.support.watch_server import Query, Server, Write, node, page, until

__all__ = ["server", "settings"]
MANY = 5


def pod(number: int) -> dict[str, object]:
    return {
        **POD,
        "metadata": {**POD["metadata"], "name": f"w{number}", "uid": f"u{number}"},
        "spec": {"nodeName": f"n{number}"},
    }


def test_who_answers_one_hurried_drain_with_an_error_is_not_asked_for_the_others(
    server: Server, rest: Rest, settings: FleetSettings
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
            fleet = Reconciler(settings, api, lambda words: None)
            once, hurries = fleet.fast_path.run_once, 0

            async def counted() -> None:
                nonlocal hurries
                await once()
                hurries += 1

            fleet.fast_path.run_once = counted  # type: ignore[method-assign]
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: hurries >= 1 and bool(refused))
                return {path.rpartition("/")[2] for path in refused}
            finally:
                ends.set()
                fleet.stop.set()
                await task

    tried = asyncio.run(whole())
    assert len(tried) == len(refused) == 1


@pytest.mark.parametrize("late", [False, True], ids=["refused", "late"])
def test_a_hurried_drain_that_was_not_done_is_tried_when_all_is_decided_next(
    server: Server, rest: Rest, settings: FleetSettings, late: bool
) -> None:
    """The drain is still due. A fleet that remembers it as done would skip it again, and the node would take jobs."""
    ends, slow, asked = threading.Event(), threading.Event(), threading.Event()
    looks = 0
    drained: list[str] = []
    passes: list[bool] = []

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal looks
        looks += "update_time" in path
        if method == "POST":
            drained.append(path)
        elif "update_time" in path and looks > 3 and not asked.is_set():
            slow.set()
            ends.wait(60)
        elif "/node/" in path and not ends.is_set():
            asked.set()
            if not late:
                return 500, json.dumps({"errors": [{"error": "no"}]}).encode()
            return nodes({**SLURM, "comment": "changed, for a moment"})
        return nodes(SLURM)

    def watches(query: Query, write: Write) -> None:
        slow.wait(60)
        write({"type": "MODIFIED", "object": node("n0", 2, cordoned=True)})
        server.hold(query, write)

    rest.answers, server.watches, server.lists = answers, watches, lambda query: page(node("n0"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            act, once, hurries = fleet.act, fleet.fast_path.run_once, 0

            async def noted(world: Any) -> int:
                after = ends.is_set()
                changed = await act(world)
                passes.extend([bool(drained)] if after else [])
                return changed

            async def counted() -> None:
                nonlocal hurries
                await once()
                hurries += asked.is_set()

            fleet.act, fleet.fast_path.run_once = noted, counted  # type: ignore[method-assign, assignment]
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: hurries >= 1)
                ends.set()
                await until(lambda: bool(passes))
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert passes[0], "the next one tries it"


def test_a_pod_that_may_get_a_job_is_protected_before_what_takes_long(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """Up to thirty changes go one by one, and each may take its whole deadline: until then others could evict it."""
    ends = threading.Event()
    drained: list[bool] = []
    protected: list[bool] = []

    def answers(method: str, path: str) -> tuple[int, bytes]:
        if method == "POST":
            drained.append(bool(protected))
            ends.wait(60)
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(2)))

    def changes(method: str, path: str, body: Any) -> int:
        protected.extend([ends.is_set()] if "minivm.io/free" in body.get("metadata", {}).get("labels", {}) else [])
        return 200

    labels = {**POD["metadata"]["labels"], "minivm.io/free": "true"}
    free = {**pod(1), "metadata": {**POD["metadata"], "name": "w1", "uid": "u1", "labels": labels}}
    server.pods, server.changes = [pod(0), free], changes
    rest.answers, server.watches = answers, server.hold
    server.lists = lambda query: page(node("n0", cordoned=True), node("n1"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            # What people ask for has a hand of its own, and is not what is waited for here.
            fleet.fast_path.run_once = never  # type: ignore[method-assign]
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: bool(drained))
            finally:
                ends.set()
                fleet.stop.set()
                await task

    async def never() -> None:
        return

    asyncio.run(whole())
    assert drained[0] and protected[0] is False


def test_a_cordon_does_not_wait_until_all_else_is_done(server: Server, rest: Rest, settings: FleetSettings) -> None:
    """Conditions on ten thousand pods and Nodes take minutes, and a server may take long for each."""
    ends = threading.Event()
    drained: list[bool] = []
    begun = threading.Event()

    def changes(method: str, path: str, body: object) -> int:
        if path.endswith("w0/status"):
            begun.set()
            ends.wait(60)
        return 200

    def answers(method: str, path: str) -> tuple[int, bytes]:
        drained.extend([ends.is_set()] if method == "POST" else [])
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(2)))

    def watches(query: Query, write: Write) -> None:
        begun.wait(60)
        write({"type": "MODIFIED", "object": node("n1", 2, cordoned=True)})
        server.hold(query, write)

    unshown = {**pod(0), "status": {}}
    server.pods, server.changes = [unshown, pod(1)], changes
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(node("n0"), node("n1"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: bool(drained))
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert drained[0] is False, "while that is still on its way"


def test_a_cordon_waits_neither_for_threads_nor_for_what_is_told_of_the_one_before(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """Slurm requests, the page or lifted drains may hold every available thread for minutes."""
    drained: list[str] = []
    shown, ends = threading.Event(), threading.Event()

    def changes(method: str, path: str, body: object) -> int:
        if path.endswith("/events"):
            ends.wait(60)
        return 200

    def answers(method: str, path: str) -> tuple[int, bytes]:
        drained.extend([path.rpartition("/")[2]] if method == "POST" else [])
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(2)))

    def watches(query: Query, write: Write) -> None:
        shown.wait(60)
        write({"type": "MODIFIED", "object": node("n0", 2, cordoned=True)})
        while not drained and not ends.is_set():
            ends.wait(0.01)
        write({"type": "MODIFIED", "object": node("n1", 2, cordoned=True)})
        server.hold(query, write)

    server.pods, server.changes = [pod(0), pod(1)], changes
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(node("n0"), node("n1"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: fleet.stats.workers == 2)
                threads = ThreadPoolExecutor(1)
                asyncio.get_running_loop().set_default_executor(threads)
                threads.submit(ends.wait, 60)
                shown.set()
                await until(lambda: len(drained) == 2)
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert drained == ["w0", "w1"]


def test_of_a_cordon_only_what_has_changed_is_looked_at(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With five thousand nodes, looking at all of them each time took longer than everything else."""
    drained: list[str] = []
    known = threading.Event()
    looked_at: list[list[str]] = []
    wrapped = drain.find_urgent_drains

    def hurried(workers: Iterable[Worker], *more: Any) -> Iterator[Drain]:
        found = list(workers)
        looked_at.append([one.name for one in found])
        return wrapped(found, *more)

    def answers(method: str, path: str) -> tuple[int, bytes]:
        drained.extend([path.rpartition("/")[2]] if method == "POST" else [])
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(MANY)))

    def watches(query: Query, write: Write) -> None:
        known.wait(60)
        write({"type": "MODIFIED", "object": node("n3", 2, cordoned=True)})
        server.hold(query, write)

    server.pods = [pod(number) for number in range(MANY)]
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(*(node(f"n{number}") for number in range(MANY)))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: fleet.stats.workers == MANY)
                monkeypatch.setattr(reconciler, "find_urgent_drains", hurried)
                known.set()
                await until(lambda: bool(drained))
            finally:
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert drained == ["w3"]
    assert ["w3"] in looked_at and all(len(names) <= 1 for names in looked_at)


def test_cordons_in_a_crowd_are_as_many_a_second_as_a_look_has_changes_and_not_as_many_a_look(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at five thousand nodes takes seconds: whoever cordons a row of racks waited for several of them."""
    monkeypatch.setattr(reconciler, "PACE_S", 0.1)
    settings.policy.write_text(json.dumps({"changes": 2}))
    ends, begun = threading.Event(), threading.Event()
    drained: list[str] = []

    def changes(method: str, path: str, body: object) -> int:
        if path.endswith("w0/status"):
            begun.set()
            ends.wait(60)
        return 200

    def answers(method: str, path: str) -> tuple[int, bytes]:
        drained.extend([path.rpartition("/")[2]] if method == "POST" else [])
        return nodes(*({**SLURM, "name": f"w{number}"} for number in range(3 * MANY)))

    def watches(query: Query, write: Write) -> None:
        begun.wait(60)
        for number in range(1, 3 * MANY):
            write({"type": "MODIFIED", "object": node(f"n{number}", 2, cordoned=True)})
        server.hold(query, write)

    unshown = {**pod(0), "status": {}}
    server.pods, server.changes = [unshown, *(pod(number) for number in range(1, 3 * MANY))], changes
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(*(node(f"n{number}") for number in range(3 * MANY)))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: len(drained) == 3 * MANY - 1)
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert len(drained) == len({*drained}) == 3 * MANY - 1


def test_what_ends_no_job_is_done_several_at_a_time_and_not_all_at_once(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    now = most = done = 0
    lock, several = threading.Lock(), threading.Event()

    def changes(method: str, path: str, body: object) -> int:
        nonlocal now, most, done
        if path.endswith("/status"):
            with lock:
                now += 1
                most = max(most, now)
                several.set() if now == AT_ONCE else None
            several.wait(30)
            with lock:
                now, done = now - 1, done + 1
        return 200

    server.pods, server.changes = [{**pod(number), "status": {}} for number in range(3 * AT_ONCE)], changes
    rest.answers = lambda method, path: nodes(*({**SLURM, "name": f"w{number}"} for number in range(3 * AT_ONCE)))
    server.watches = server.hold
    server.lists = lambda query: page(*(node(f"n{number}") for number in range(3 * AT_ONCE)))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: done >= 3 * AT_ONCE)
            finally:
                several.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert most == AT_ONCE


def test_an_answer_of_many_nodes_is_not_looked_through_again_and_again_for_circles(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """The scan of five thousand nodes, sixty times a minute, blocked everything for up to 0.8 s each."""
    rest.answers, server.watches = lambda method, path: nodes(SLURM), server.hold
    before = gc.get_threshold()

    async def whole() -> int:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: bool(rest.asked))
                text = json.dumps([{**SLURM, "name": f"w{number}", "state": ["IDLE"]} for number in range(5000)])
                begun = sum(one["collections"] for one in gc.get_stats())
                parse_nodes(json.loads(text))
                return int(sum(one["collections"] for one in gc.get_stats()) - begun)
            finally:
                fleet.stop.set()
                await task

    try:
        assert asyncio.run(whole()) <= 1
    finally:
        gc.set_threshold(*before)


class Waits:
    """For a Lease that another one has."""

    lease_known = True

    def holds(self) -> bool:
        return False

    async def keep(self) -> None:
        return


def test_who_waits_for_the_lease_reads_the_policy_anew(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page shows it, and from the first moment that it acts it holds: a mistake is told before that."""
    monkeypatch.setattr(loop, "AT_LEAST_S", 0.05)
    server.watches = server.hold
    said: list[str] = []
    settings.policy.write_text(json.dumps({"changes": 7}))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, said.append)
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
