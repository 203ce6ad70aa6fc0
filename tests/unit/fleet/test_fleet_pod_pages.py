"""The conditions that the fleet reads from pods' pages and writes: form, when a pod is asked, what is worth a write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from fleet import FleetError
from fleet.act.observer import LATER_S, SOON_S, PodPages, can_answer, read_page
from fleet.decide.actions import ShowOnPod
from fleet.decide.conditions import show_pages
from fleet.report.events import describe_action
from fleet.world.kubernetes import KubeCondition, KubePod, KubernetesView, parse_pod
from fleet.world.pod_page import CONDITION as DEEP
from fleet.world.pod_page import GPUS, READY, parse_page

PROBED = KubeCondition("ContainersReady", "True")
POD = KubePod(
    "w0", "u0", node="n0", address="10.1.2.3", http=8650, component="worker", conditions={"ContainersReady": PROBED}
)
WELL = KubeCondition(READY, "True", "Ready")
ILL = KubeCondition(READY, "False", "Boot", "munge key not proven")


def page(*conditions: object, pod: object = "w0") -> bytes:
    return json.dumps({"pod": pod, "conditions": list(conditions)}).encode()


def item(
    type_: str = READY, status: object = "True", reason: object = "Ready", message: object = ""
) -> dict[str, object]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def test_a_page_of_all_three_is_read() -> None:
    found = parse_page(
        page(item(), item(GPUS, reason="Known", message="GPU-1"), item(DEEP, "Unknown", "Running")), "w0"
    )
    assert [(each.type, each.status, each.message) for each in found] == [
        (READY, "True", ""), (GPUS, "True", "GPU-1"), (DEEP, "Unknown", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        page(item(), pod="w1"),
        page(item(), pod=None),
        page(item(), pod="w0\n"),
        page(item("Ready")),
        page(item("PodScheduled", "False")),
        page(item("minivm.io/SlurmNode")),
        page(item(), item()),
        page(item(GPUS), item()),
        page(item(status="yes")),
        page(item(status=True)),
        page(item(reason="")),
        page(item(reason="two words")),
        page(item(reason="x" * 80)),
        page(item(message=["x"])),
        page("x"),
        json.dumps({"pod": "w0", "conditions": "x"}).encode(),
    ],
)
def test_a_page_in_another_form_is_no_answer(body: bytes) -> None:
    with pytest.raises(FleetError):
        parse_page(body, "w0")


def test_a_page_of_nothing_or_long_text_is_bounded() -> None:
    assert parse_page(page(), "w0") == ()
    (found,) = parse_page(page(item(message="\ud800\x1b[2J\n" + "x" * 60_000)), "w0")
    assert len(found.message) <= 4096 and "\n" not in found.message and "\x1b" not in found.message
    describe_action(ShowOnPod("w0", "u0", found)).encode()


@pytest.mark.parametrize(
    ("changes", "answers"),
    [
        ({}, True),
        ({"address": "fd00::7"}, True),
        ({"component": "controller"}, True),
        ({"address": ""}, False),
        ({"address": "localhost"}, False),
        ({"address": "evil.example"}, False),
        ({"address": "10.1.2.3\r\nHost: x"}, False),
        ({"address": "127.0.0.1"}, False),
        ({"address": "::1"}, False),
        ({"address": "0.0.0.0"}, False),
        ({"address": "169.254.169.254"}, False),
        ({"address": "fe80::1"}, False),
        ({"http": 0}, False),
        ({"ended": "Failed"}, False),
        ({"component": "fleet"}, False),
        ({"component": "demo"}, False),
    ],
)
def test_only_running_pods_of_slurm_are_asked_and_no_address_of_this_machine(
    changes: dict[str, object], answers: bool
) -> None:
    assert can_answer(replace(POD, **changes)) is answers  # type: ignore[arg-type]  # a table of fields


def test_the_port_is_the_containers_own() -> None:
    ports = [{"name": "probes", "containerPort": 8651}, {"name": "http", "containerPort": 9650}]
    made = {"metadata": {"name": "w0", "uid": "u"}, "spec": {"containers": [{"name": "w", "ports": ports}]}}
    assert parse_pod(made).http == 9650
    assert parse_pod({**made, "spec": {"containers": [{"name": "w"}]}}).http == 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Pods:
    """Pages whose answers the test sets, and the names of the pods that were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.asked = Clock(), list[str]()
        self.answer: Callable[[KubePod], tuple[KubeCondition, ...]] = lambda _: (WELL,)
        monkeypatch.setattr("fleet.act.observer.read_page", self._read)
        self.changes = 0
        self.pages = PodPages(self._changed, self.clock)

    async def _read(self, pod: KubePod) -> tuple[KubeCondition, ...]:
        self.asked.append(pod.name)
        return self.answer(pod)

    def _changed(self) -> None:
        self.changes += 1

    def round(self, *pods: KubePod, after: float = 0.0) -> list[str]:
        self.clock.now += after
        self.asked.clear()
        asyncio.run(self.pages.ask_due(pods))
        return sorted(self.asked)


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    return Pods(monkeypatch)


def test_a_ready_pod_is_asked_every_minute_and_at_once_when_the_kubelet_finds_otherwise(pods: Pods) -> None:
    assert pods.round(POD) == ["w0"]
    assert pods.round(POD, after=SOON_S) == []
    failing = replace(POD, conditions={"ContainersReady": KubeCondition("ContainersReady", "False")})
    assert pods.round(failing) == ["w0"]
    assert pods.round(failing) == []
    assert pods.round(failing, after=SOON_S) == ["w0"]
    assert pods.round(POD) == ["w0"]
    assert pods.round(POD, after=LATER_S) == ["w0"]
    assert pods.changes == 1, "the same answer wakes nobody"
    pods.answer = lambda _: (replace(ILL, message="starting for 5 s"),)
    pods.round(POD, after=LATER_S)
    pods.answer = lambda _: (replace(ILL, message="starting for 10 s"),)
    pods.round(POD, after=SOON_S)
    assert pods.changes == 2, "nor does a duration"


def test_a_controller_is_asked_soon_for_it_may_take_over(pods: Pods) -> None:
    controller = replace(POD, component="controller")
    assert pods.round(controller) == ["w0"]
    assert pods.round(controller, after=SOON_S) == ["w0"]


@pytest.mark.parametrize("told", [(ILL,), ()])
def test_a_pod_that_is_not_well_is_asked_soon(pods: Pods, told: tuple[KubeCondition, ...]) -> None:
    pods.answer = lambda _: told
    assert pods.round(POD) == ["w0"]
    assert pods.round(POD, after=SOON_S) == ["w0"]
    assert pods.pages.shown() == {"u0": told}


def test_many_pods_are_asked_in_turn(pods: Pods) -> None:
    many = [replace(POD, name=f"w{number}", uid=f"u{number}") for number in range(250)]
    first, second, third = (set(pods.round(*many, after=1)) for _ in range(3))
    assert [len(names) for names in (first, second, third)] == [100, 100, 50]
    assert first | second | third == {pod.name for pod in many}


def test_a_pod_that_has_gone_is_forgotten(pods: Pods) -> None:
    pods.round(POD)
    pods.round(replace(POD, uid="u1"))
    assert list(pods.pages.shown()) == ["u1"], "the next pod of that name is another"


def shows(pod: KubePod, *told: KubeCondition) -> list[tuple[str, str, str]]:
    found = list(show_pages(KubernetesView(pods={pod.name: pod}), {pod.uid: told}))
    assert all(isinstance(each, ShowOnPod) and each.uid == pod.uid for each in found)
    return [
        (each.condition.type, each.condition.status, each.condition.message)
        for each in found
        if isinstance(each, ShowOnPod)
    ]


def having(*conditions: KubeCondition, probed: str = "True") -> KubePod:
    return replace(
        POD, conditions={each.type: each for each in (*conditions, KubeCondition("ContainersReady", probed))}
    )


def test_what_differs_is_written() -> None:
    assert shows(POD, WELL, KubeCondition(GPUS, "True", "Known", "GPU-1")) == [
        (READY, "True", ""),
        (GPUS, "True", "GPU-1"),
    ]
    assert shows(having(WELL), WELL) == []
    assert shows(having(WELL), ILL) == [(READY, "False", "munge key not proven")]


def test_a_duration_alone_is_not_worth_a_write() -> None:
    before = replace(ILL, message="slurmd: exited 1; failed 4 times, next start in 2 s")
    assert shows(having(before), replace(before, message=before.message.replace("2 s", "900 ms"))) == []
    assert shows(having(before), replace(before, message=before.message.replace("4 times", "5 times")))


def test_the_time_of_the_transition_stays_while_the_status_does() -> None:
    before = replace(ILL, since=5.0)
    (kept,) = show_pages(KubernetesView(pods={"w0": having(before)}), {"u0": (replace(ILL, message="another"),)})
    assert isinstance(kept, ShowOnPod) and kept.condition.since == 5.0
    (fresh,) = show_pages(KubernetesView(pods={"w0": having(before)}), {"u0": (WELL,)})
    assert isinstance(fresh, ShowOnPod) and fresh.condition.since == 0.0


def test_without_an_answer_ready_is_taken_back_only_where_the_kubelet_agrees() -> None:
    assert shows(having(WELL)) == [], "the fleet's own network may be cut"
    assert shows(having(WELL, probed="False"))[0][:2] == (READY, "Unknown")
    assert shows(having(ILL, probed="False")) == []
    assert shows(having(probed="False")) == []


def test_pods_of_the_controller_and_of_logins_are_shown_too() -> None:
    found = show_pages(KubernetesView(others={"c": replace(POD, name="c", component="controller")}), {"u0": (ILL,)})
    assert [each.pod for each in found if isinstance(each, ShowOnPod)] == ["c"]


class Server:
    """An HTTP server that answers with the test's bytes and keeps what it was asked."""

    def __init__(self, answer: bytes, *, hold: bool = False) -> None:
        self.answer, self.hold, self.asked = answer, hold, b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        if not self.hold:
            writer.close()

    async def read(self) -> tuple[KubeCondition, ...]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await read_page(replace(POD, address="127.0.0.1", http=port))
        finally:
            server.close()


def answer(body: bytes, status: bytes = b"200 OK", head: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + head + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body


def test_a_page_is_asked_for_without_a_token() -> None:
    server = Server(answer(page(item())))
    assert asyncio.run(server.read()) == (WELL,)
    lines = server.asked.split(b"\r\n")
    assert lines[0] == b"GET /conditions HTTP/1.1"
    assert [line.partition(b":")[0] for line in lines[1:] if line] == [b"Host", b"Connection"]


@pytest.mark.parametrize(
    ("sent", "hold"),
    [
        (b"", False),
        (b"SSH-2.0-x\r\n\r\n", False),
        (answer(page(item()), b"302 Found", b"Location: http://169.254.169.254/\r\n"), False),
        (answer(page(item()), b"404 Not Found"), False),
        (b"HTTP/1.1 200 OK\r\n\r\n" + page(item()), False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort", True),
    ],
)
def test_an_answer_in_another_form_or_too_late_is_none(
    sent: bytes, hold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.act.observer.PAGE_WITHIN_S", 0.3)
    assert asyncio.run(Server(sent, hold=hold).read()) == ()
