"""The loop between two servers: what it hears it decides on at once, and not when time has passed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet import reconciler as loop
from fleet.act import changes, observer
from fleet.act import slurm_client as adapter
from fleet.act.api_client import ApiClient
from fleet.decide.decide import Decision, decide
from fleet.policy import FleetSettings
from fleet.reconciler import Reconciler
from fleet.world.snapshot import Unknown
from tests.support.fleet_pages import asked
from tests.support.fleet_run import POD, SLURM, server, settings
from tests.support.ports import free_port
from tests.support.slurm_rest import Rest, nodes
from tests.support.watch_server import Query, Server, Write, node, page, until
from tests.support.webhook_receiver import TAKES, Receiver, call

# The fixtures that this module's tests ask for.
__all__ = ["server", "settings"]


def test_a_cordon_is_acted_on_when_it_is_heard_and_not_when_time_has_passed(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AT_LEAST_S", 1e9)
    quiet = 0

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal quiet
        if "update_time" in path:
            quiet += 1
            return 304, b""
        return nodes(SLURM)

    def watches(query: Query, write: Write) -> None:
        # Once it has decided, and has looked at Slurm in vain since.
        asyncio.run(until(lambda: quiet >= 2))
        write({"type": "MODIFIED", "object": node("n0", 2, cordoned=True)})
        server.hold(query, write)

    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(node("n0"))
    said: list[str] = []

    async def whole() -> None:
        async with server.api() as api:
            task = asyncio.create_task(Reconciler(settings, api, said.append).run())
            try:
                await until(lambda: any(method == "POST" for method, _, _ in rest.asked))
                await until(lambda: any("/events" in path for _, path, _ in server.asked))
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(whole())
    assert "drain w0 in Slurm: minivm: fleet: cordon: node n0 is cordoned" in said
    (event,) = (body for _, path, body in server.asked if path.startswith("/api/v1/namespaces/default/events"))
    assert (event["involvedObject"]["name"], event["reason"]) == ("w0", "Drained")


def test_people_see_what_it_has_decided_where_its_settings_say_and_nowhere_else(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    ports = [free_port(), free_port()]
    settings = replace(settings, http=("127.0.0.1", ports[0]), page=("127.0.0.1", ports[1]))
    rest.answers, server.watches = (lambda method, path: nodes(SLURM)), server.hold
    server.lists = lambda query: page(node("n0"))
    heads = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: fleet.stats.workers == 1)
                found = json.loads((await asked(ports[1], b"GET /fleet.json" + heads)).partition(b"\r\n\r\n")[2])
                (cell,) = found["cells"]
                assert (found["acts"], cell["name"], cell["state"], cell["node"]) == (True, "w0", "TakesJobs", "n0")
                assert b" 404 " in (await asked(ports[1], b"GET /metrics" + heads)).splitlines()[0]
                assert b" 404 " in (await asked(ports[0], b"GET /fleet.json" + heads)).splitlines()[0]
            finally:
                fleet.stop.set()
                await task

    asyncio.run(whole())


def test_a_cordon_does_not_wait_until_slurm_has_told_of_all_its_nodes(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """With five thousand nodes Slurm's answer takes seconds, and a busy cluster sends it again and again."""
    ends, slow = threading.Event(), threading.Event()
    drains: list[bool] = []

    def answers(method: str, path: str) -> tuple[int, bytes]:
        if method == "POST":
            drains.append(ends.is_set())
        if "update_time" in path and looked():
            slow.set()
            ends.wait(60)
        return nodes(SLURM)

    def looked() -> bool:
        return sum("update_time" in path for _, path, _ in rest.asked) > 3

    def watches(query: Query, write: Write) -> None:
        slow.wait(60)
        write({"type": "MODIFIED", "object": node("n0", 2, cordoned=True)})
        server.hold(query, write)

    rest.answers, server.watches, server.lists = answers, watches, lambda query: page(node("n0"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: bool(drains))
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert drains[0] is False, "while it still tells of them"


def test_a_heartbeat_is_no_news(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five thousand Nodes seventeen write their status each second, and one decision takes a fifth of a second."""
    monkeypatch.setattr(loop, "AT_LEAST_S", 1e9)
    beats, decided, looked, beaten = 50, 0, 0, 0

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal looked
        looked += "update_time" in path
        return (304, b"") if "update_time" in path else nodes(SLURM)

    def counted(*given: Any) -> Any:
        nonlocal decided
        decided += 1
        return decide(*given)

    def settled(since: int) -> bool:
        return looked >= since + 2

    def watches(query: Query, write: Write) -> None:
        nonlocal beaten
        asyncio.run(until(lambda: settled(2)))  # the first looks are news
        before = decided
        for version in range(2, 2 + beats):
            write({"type": "MODIFIED", "object": node("n0", version)})
            write({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}})
        here = looked
        asyncio.run(until(lambda: settled(here)))
        beaten = decided - before
        write({"type": "MODIFIED", "object": node("n0", 100, cordoned=True)})
        server.hold(query, write)

    monkeypatch.setattr(loop, "decide_safely", counted)
    rest.answers, server.watches = answers, watches
    server.lists = lambda query: page(node("n0"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: any(method == "POST" for method, _, _ in rest.asked))
                versions = [one.version for one in fleet.cache.nodes.now.objects.values()]
                assert (beaten, versions) == (0, ["100"]), "kept, and nothing decided for it"
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(whole())


def test_what_came_too_late_is_made_though_no_news_come(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat may have made another version of the object that the fleet saw."""
    monkeypatch.setattr(loop, "AT_LEAST_S", 1e9)
    shown: list[str] = []

    def changes(method: str, path: str, body: Any) -> int:
        shown.extend([path] if path.endswith("w0/status") else [])
        return 409 if path.endswith("w0/status") and len(shown) == 1 else 200

    drained = {**SLURM, "state": ["IDLE", "DRAIN"], "reason": "fan 3"}
    rest.answers = lambda method, path: (304, b"") if "update_time" in path else nodes(drained)
    server.changes, server.watches, server.lists = changes, server.hold, lambda query: page(node("n0"))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: len(shown) >= 2)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(whole())


def test_what_is_refused_is_told_once_and_is_no_longer_due_at_each_look(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    shown: list[str] = []

    def changes(method: str, path: str, body: Any) -> int:
        shown.extend([path] if path.endswith("w0/status") else [])
        return 403 if path.endswith("w0/status") else 200

    drained = {**SLURM, "state": ["IDLE", "DRAIN"], "reason": "fan 3"}
    rest.answers = lambda method, path: (304, b"") if "update_time" in path else nodes(drained)
    server.changes, server.lists = changes, lambda query: page(node("n0"))
    said: list[str] = []

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, said.append)
            world = await fleet.look()
            for _ in range(5):
                await fleet.act(world)
            assert len([path for path in shown if "/pods/" in path]) == 1, "the others' turn comes first"
            assert len([one for one in said if "show Slurm's state on w0" in one]) == 1, said

    asyncio.run(whole())


def test_a_node_that_was_silent_before_it_was_there_is_not_silent_for_long(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """A clock that was set, ours or another's, drains nothing and lets nothing pass for dead."""
    looks = 0

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal looks
        looks += 1
        return nodes(SLURM)

    silent = {**node("n0"), "status": {"conditions": [{"type": "Ready", "status": "Unknown",
              "lastTransitionTime": "2026-11-20T00:00:00Z"}]}}  # fmt: skip
    rest.answers, server.watches, server.lists = answers, server.hold, lambda query: page(silent)

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            await until(lambda: looks >= 3)
            fleet.stop.set()
            await task

    asyncio.run(whole())
    assert not [path for method, path, _ in rest.asked if method == "POST"]


def test_who_sets_the_clock_ahead_makes_no_time_pass(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the delays of `gone`, `lost`, `leaveWithin` and `verify` would be due at once."""
    monkeypatch.setattr(loop, "AT_LEAST_S", 0.1)
    monkeypatch.setattr(loop, "EVERY_S", 0.1)
    hours: list[float] = []

    def seen(world: Any, memory: Any, now: float, policy: Any) -> Any:
        hours.append(now)
        return decide(world, memory, now, policy)

    monkeypatch.setattr(loop, "decide_safely", seen)
    rest.answers, server.watches = lambda method, path: nodes(SLURM), server.hold

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            await until(lambda: len(hours) >= 2)
            wall = time.time
            monkeypatch.setattr(time, "time", lambda: wall() + 86400)
            before = len(hours)
            await until(lambda: len(hours) >= before + 2)
            fleet.stop.set()
            await task

    asyncio.run(whole())
    assert hours == sorted(hours)
    assert hours[-1] - hours[0] < 3600


def test_a_slurm_that_answers_nobody_is_not_waited_for_three_times_as_long(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its machine may be dead, and time alone may prove it."""
    monkeypatch.setattr(adapter, "WITHIN_S", 2.0)
    monkeypatch.setattr(loop, "AT_LEAST_S", 0.2)
    asked, ends = 0, threading.Event()

    def answers(method: str, path: str) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        ends.wait(60)
        return nodes(SLURM)

    rest.answers, server.watches = answers, server.hold

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: asked >= 5)
            finally:
                ends.set()
                fleet.stop.set()
                await task

    asyncio.run(whole())


def test_jobs_that_cannot_be_told_keep_no_node_drained(server: Server, rest: Rest, settings: FleetSettings) -> None:
    """Users choose how many jobs there are and how many words each has. A lifted cordon asks for no jobs."""
    drained = {**SLURM, "state": ["IDLE", "DRAIN"], "reason": "minivm: fleet: cordon: fan 3"}
    failed = json.dumps({"errors": [{"error": "too many"}]}).encode()
    rest.answers = lambda method, path: (500, failed) if "/jobs/" in path else nodes(drained)
    server.pods = [{**POD, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}]
    server.versions, server.watches = {"w0": "1", "n0": "1"}, server.hold
    said: list[str] = []

    def undrained() -> int:
        return sum(body is not None and body.get("state") == ["UNDRAIN"] for _, _, body in rest.asked)

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, said.append)
            task = asyncio.create_task(fleet.run())
            try:
                # At its first look it may not know Kubernetes yet, and ask for no jobs.
                await until(lambda: any("too many" in line for line in said))
                before = undrained()
                await until(lambda: undrained() > before)
            finally:
                fleet.stop.set()
                await task

    asyncio.run(whole())
    assert any(line.startswith("fleet: Slurm's jobs cannot be read") and "too many" in line for line in said), said


class Held:
    """A Lease that is given back when this ends."""

    lease_known = True

    def __init__(self, given_back: Callable[[], object]) -> None:
        self.given_back = given_back

    def holds(self) -> bool:
        return True

    async def keep(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.given_back()


def test_told_to_end_it_gives_the_lease_back_when_slurm_has_answered_and_no_sooner(
    server: Server, rest: Rest, settings: FleetSettings
) -> None:
    """slurmrestd may still execute an unanswered request, and the next leader may act on an older snapshot."""
    ends = threading.Event()
    happened: list[str] = []

    def answers(method: str, path: str) -> tuple[int, bytes]:
        if method == "POST":
            happened.append("begun")
            ends.wait(30)
            happened.append("done")
        return nodes(SLURM)

    rest.answers, server.watches = answers, server.hold
    server.lists = lambda query: page(node("n0", cordoned=True))

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            fleet.leader = Held(lambda: happened.append("given back"))
            task = asyncio.create_task(fleet.run())
            await until(lambda: "begun" in happened)
            fleet.stop.set()
            asyncio.get_running_loop().call_later(0.5, ends.set)
            await task

    asyncio.run(whole())
    assert happened == ["begun", "done", "given back"]


@pytest.mark.parametrize("turns", range(5))
def test_it_ends_when_it_is_to_end_also_in_the_turn_in_which_news_come(
    server: Server, rest: Rest, settings: FleetSettings, turns: int
) -> None:
    rest.answers = lambda method, path: nodes(SLURM)
    server.lists, server.watches = (lambda query: page(node("n0"))), server.hold

    async def whole() -> bool:
        async with server.api() as api:
            fleet = Reconciler(settings, api, lambda words: None)
            task = asyncio.create_task(fleet.run())
            await until(lambda: not isinstance(fleet.cache.world(), Unknown) and bool(fleet._news._waiters))
            fleet._news.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=120)
            ended = task.done()
            while not task.done():
                task.cancel()
                await asyncio.sleep(0.01)
            return ended

    assert asyncio.run(whole())


def test_a_mistake_about_one_thing_keeps_nothing_else_from_its_turn_and_is_told_once(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fleet that leads would meet it again: nothing at all would be done any more."""
    rest.answers = lambda method, path: nodes(SLURM, {**SLURM, "name": "w1"})
    server.lists, server.watches = (lambda query: page(node("n0"))), server.hold
    server.pods = [
        {**POD, "metadata": {**POD["metadata"], "name": name, "uid": name}, "status": {}} for name in ("w0", "w1")
    ]
    said: list[str] = []
    tried = 0

    async def whole() -> None:
        async with server.api() as api:
            right = changes.patch_status

            async def shows(api: ApiClient, name: str, *further: Any) -> None:
                nonlocal tried
                if name == "w0":
                    tried += 1
                    raise KeyError("containers")
                await right(api, name, *further)

            monkeypatch.setattr(changes, "patch_status", shows)
            fleet = Reconciler(settings, api, said.append)
            task = asyncio.create_task(fleet.run())
            try:
                await until(lambda: task.done() or tried >= 2)
                assert not task.done()
            finally:
                fleet.stop.set()
                await asyncio.wait([task])

    asyncio.run(whole())
    assert any(path.endswith("/w1/status") for _, path, _ in server.asked)
    (told,) = (words for words in said if "Traceback" in words)
    assert "w0" in told and "KeyError: 'containers'" in told


def test_who_is_called_and_does_not_answer_holds_up_no_cordon_and_what_he_takes_is_noted_once(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, held, noted = Receiver(), threading.Event(), "gpu-17-7c6cc41e/status"
    receiver.answers = lambda way: held.wait(60)
    act = call(f"http://127.0.0.1:{receiver.port}/")

    def notes() -> int:
        return sum(method == "PATCH" and noted in path for method, path, _ in server.asked)

    def due(*given: Any) -> Decision:
        found = decide(*given)
        return found if notes() else replace(found, changes=(act, *found.changes))

    def watches(query: Query, write: Write) -> None:
        asyncio.run(until(lambda: bool(receiver.asked)))
        write({"type": "MODIFIED", "object": node("n0", 2, cordoned=True)})
        server.hold(query, write)

    monkeypatch.setattr(loop, "decide_safely", due)
    rest.answers, server.watches = (lambda method, path: nodes(SLURM)), watches
    server.lists = lambda query: page(node("n0"))
    said: list[str] = []

    async def whole() -> None:
        async with server.api() as api:
            fleet = Reconciler(settings, api, said.append)
            task = asyncio.create_task(fleet.run())
            await until(lambda: any(method == "POST" for method, _, _ in rest.asked))
            assert (notes(), len(receiver.asked)) == (0, 1), "drained, while he thinks about it"
            assert not any("call 127.0.0.1" in words for words in said), "and that is no news at each look"
            receiver.answers = TAKES
            held.set()  # this connection ends without an answer: he is asked once more
            await until(lambda: notes() > 0)
            fleet.stop.set()
            await task

    asyncio.run(whole())
    assert [one["key"] for _, _, one in receiver.asked] == ["uid-17/1"] * 2
    assert notes() == 1
    assert any("the connection ended before an answer" in words for words in said)
    assert any(words.startswith(f"call 127.0.0.1:{receiver.port} for gpu-17-1") for words in said)
    receiver.ended.set()
    receiver.socket.close()


@pytest.mark.parametrize("slurm_answers", [True, False])
def test_what_a_pods_page_shows_is_written_into_its_status(
    server: Server, rest: Rest, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch, *, slurm_answers: bool
) -> None:
    """The request for the page has no token. Without slurmctld the reasons are of most use, and are written too."""
    monkeypatch.setattr(observer, "can_answer", lambda pod: pod.http > 0)  # the test's pod is on loopback
    rest.answers = lambda method, path: nodes(SLURM) if slurm_answers else (500, b"")
    shown = {"type": "minivm.io/Ready", "status": "False", "reason": "Boot", "message": "munge key not proven"}
    body = json.dumps({"pod": "w0", "conditions": [shown]}).encode()
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def whole() -> None:
        pages = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = pages.sockets[0].getsockname()[1]
        ports = {"containers": [{"name": "worker", "ports": [{"name": "http", "containerPort": port}]}]}
        pod = POD | {"spec": POD["spec"] | ports, "status": {"podIP": "127.0.0.1"}}
        server.pods, server.lists = [pod], lambda query: page(node("n0"))
        server.watches = server.hold
        async with server.api() as api:
            task = asyncio.create_task(Reconciler(replace(settings, conditions=True), api, lambda words: None).run())
            try:
                await until(lambda: any("/pods/w0/status" in path for _, path, _ in patches()))
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                pages.close()

    def patches() -> list[tuple[str, str, Any]]:
        return [each for each in server.asked if "minivm.io/Ready" in json.dumps(each[2])]

    asyncio.run(whole())
    _, _, patch = patches()[0]
    assert patch["metadata"]["uid"] == POD["metadata"]["uid"]
    (condition,) = patch["status"]["conditions"]
    assert {key: condition[key] for key in shown} == shown
    assert b"authorization" not in heads[0].lower() and b"token" not in heads[0].lower()
