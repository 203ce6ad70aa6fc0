"""Small pure functions: log lines, notifications, reasons, grace periods, records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.engine import order
from init.engine.engine import Condition, Engine
from init.engine.machine import Trace
from init.engine.states import MAIN, Exited, Kill, Notified, PodPhase, ProbeFailed, Spawn, Spawned, SpawnFailed
from init.errors import RequestError
from init.lean import fields, record, replace
from init.pid1.logs import CONTINUES, KEPT, LONGEST, Ring, cut, tag_json, tag_text
from init.pid1.notify import parse
from init.pid1.syslog import line
from init.plan.compile import compile_plan
from init.plan.spec import parse_drain, parse_service
from init.pod.client import Client, control_socket
from init.view import reasons


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_however_the_stream_is_cut_every_line_comes_once(chunks: list[bytes]) -> None:
    carry, out = b"", b""
    for chunk in chunks:
        block, carry = cut(carry, chunk)
        assert block[-1:] in (b"", b"\n")
        out += block
    assert out + carry == b"".join(chunks) and b"\n" not in carry


def test_an_endless_line_is_passed_on_in_parts() -> None:
    block, carry = cut(b"", b"x" * (LONGEST + 10))
    assert block == b"x" * LONGEST + CONTINUES and carry == b"x" * 10


@given(st.lists(st.binary(max_size=20).filter(lambda text: b"\n" not in text), min_size=1, max_size=10))
def test_each_line_is_tagged(lines: list[bytes]) -> None:
    tagged = tag_text(b"\n".join(lines) + b"\n", b"s")
    assert tagged == b"".join(b"s | " + text + b"\n" for text in lines)
    assert tag_json(b"\n".join(lines) + b"\n", "s", "stdout", "t").count(b'"service": "s"') == len(lines)


def test_the_ring_keeps_the_newest_and_is_bounded() -> None:
    ring = Ring()
    for number in range(3000):
        ring.add(f"{number} {'x' * 1000}\n".encode())
    lines = ring.tail(10**9)
    assert lines[-1].startswith("2999 ") and KEPT * 0.9 < sum(map(len, lines)) < KEPT * 1.1
    ring.add(b"y" * 3 * KEPT + b"\n")
    ring.add(b"why it failed\n\n  \n")
    assert ring.last() == "why it failed" and ring.tail(0) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"READY=1\nSTATUS=all = well\nMAINPID=42", Notified(ready=True, status="all = well", main_pid=42)),
        (b"RELOADING=1\nMONOTONIC_USEC=5", Notified(reloading=True)),
        (b"WATCHDOG=1", Notified(watchdog=True)),
        (b"STOPPING=1\nX_UNKNOWN=1\nnonsense", Notified(status="stopping")),
        (b"READY=0\nMAINPID=-1", Notified()),
        (b"MAINPID=99999999999999999999", Notified()),
        (b"STATUS=\xff", Notified(status="\ufffd")),
        (b"STATUS=\x1b[2Jred\x07\t\xe2\x80\xae \xc2\x9bm", Notified(status="[2Jred m")),
        (b"", Notified()),
    ],
)
def test_notifications(data: bytes, message: Notified) -> None:
    assert parse(data) == message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"<86>Jan  1 00:00:00 sshd[7]: hello\0", b"sshd[7]: hello\n"),
        (b"<13>app: no time\n", b"app: no time\n"),
        (b"neither\nof them", b"neither of them\n"),
    ],
)
def test_syslog_lines(data: bytes, text: bytes) -> None:
    assert line(data) == text


def engine(**services: dict[str, object]) -> Engine:
    found = [
        parse_service(name, ({} if item.get("kind") == "gate" else {"command": ["/x"]}) | item, "t")
        for name, item in services.items()
    ]
    made = Engine(compile_plan("worker", found, parse_drain({"command": ["/d"]}, "t")), 30, lambda: 0.5, Trace())
    made.begin(0.0)
    return made


def test_a_reason_is_followed_to_its_leaf() -> None:
    made = engine(
        controller={"kind": "gate", "ready": {"tcp": "slurm-controller:6817"}},
        slurmd={"needs": ["controller"], "ready": "notify"},
        proof={"kind": "oneshot", "needs": ["slurmd"]},
        munged={"ready": "notify"},
    )
    made.handle("controller", ProbeFailed("tcp slurm-controller:6817 refused", "resolves to 10.1.2.3"), 1.0)
    made.handle("munged", Spawned(7, MAIN), 1.0)
    made.handle("munged", Notified(ready=True), 1.0)
    told = "controller: tcp slurm-controller:6817 refused for 12 s (resolves to 10.1.2.3)"
    assert reasons.service_reasons(made, "slurmd", 12.0) == (f"waits for {told}",)
    assert reasons.service_reasons(made, "proof", 12.0) == (f"waits for {told}",)
    assert reasons.service_reasons(made, "munged", 12.0) == ()
    assert reasons.pod_reasons(made, 12.0) == (f"slurmd, proof wait for {told}",)


def test_a_failed_start_tells_how_often_and_when_next() -> None:
    made = engine(a={"ready": "notify", "restart": {"jitter": 0}})
    for pid, now in ((5, 1.0), (6, 1.0), (7, 2.0)):
        made.handle("a", Spawned(pid, MAIN), now)
        made.handle("a", Exited(pid, 3, last_line="no key"), now)
        made.tick(2.0)
    assert "next start in 2 s" in reasons.pod_reasons(made, 2.0)[0]
    made.tick(4.0)
    made.handle("a", Spawned(8, MAIN), 4.0)
    made.handle("a", Exited(8, 3, last_line="no key"), 4.0)
    assert reasons.pod_reasons(made, 4.0) == ("a: exited 3: no key; failed 4 times, next start in 4 s",)


def test_what_is_not_required_only_degrades() -> None:
    made = engine(a={"required": False, "ready": "notify"})
    assert reasons.pod_reasons(made, 5.0) == ()
    assert reasons.list_degradations(made, 4.9) == (), "it has just started"
    assert reasons.list_degradations(made, 5.0) == ("a: started 5 s ago, no READY=1 yet",)
    made.set_condition(Condition("gitsync", "cannot fetch", blocking=False, expires=None))
    assert reasons.list_degradations(made, 5.0)[0] == "gitsync: cannot fetch"
    made.set_condition(Condition("gitsync", "cannot fetch", blocking=True, expires=None))
    assert reasons.pod_reasons(made, 5.0) == ("gitsync: cannot fetch",)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250 ms"), (1, "1 s"), (119, "119 s"), (600, "10 min"), (9000, "2 h"), (-1, "0 ms")]
)
def test_durations(seconds: float, text: str) -> None:
    assert reasons.duration(seconds) == text


def test_graces_are_shortened_alike_when_the_way_through_is_too_long() -> None:
    services = [
        parse_service("a", {"command": ["/x"], "stop": {"grace": 30}}, "t"),
        parse_service("b", {"command": ["/x"], "stop": {"grace": 10}, "needs": ["a"]}, "t"),
        parse_service("c", {"command": ["/x"], "stop": {"grace": 5}}, "t"),
    ]
    assert order.longest_stop(services) == 40
    assert order.scale_graces(services, 100) == {"a": 30, "b": 10, "c": 5}
    assert order.scale_graces(services, 20) == {"a": 15, "b": 5, "c": 2.5}
    drain = parse_drain({"command": ["/d"], "budget": 100}, "t")
    assert order.drain_budget(drain, services, 200) == 100
    assert order.drain_budget(drain, services, 101) == 60
    assert order.drain_budget(drain, services, 60) == 30, "at least half"
    assert order.drain_budget(drain, services, 60, 50) == 50, "the services are shortened"
    assert order.drain_budget(drain, services, 60, 58) == 60 - order.LEAST
    assert order.drain_budget(drain, services, 60, 10) == 30


def test_the_trace_keeps_the_boot_for_ever() -> None:
    trace = Trace(kept=40)
    for number in range(500):
        trace.add(float(number), "a", str(number))
    found = [item.event for item in trace.happenings()]
    assert found[:10] == [str(number) for number in range(10)] and found[-1] == "499" and len(found) == 50


def test_records_behave_as_frozen_dataclasses() -> None:
    @record(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2

    point = Point(1)
    assert (point.x, point.y, repr(point)) == (1, 2, "Point(x=1, y=2)")
    assert point == Point(1, 2) != Point(2) and hash(point) == hash(Point(1)) and fields(point) == {"x": 1, "y": 2}
    assert replace(point, y=5) == Point(1, y=5)
    with pytest.raises(AttributeError, match="frozen"):
        point.x = 5  # type: ignore[misc]
    for wrong in ({}, {"x": 1, "z": 2}):
        with pytest.raises(TypeError):
            Point(**wrong)
    with pytest.raises(TypeError):
        Point(1, 2, 3)  # type: ignore[call-arg]


def test_a_periodic_service_does_not_run_again_while_the_pod_stops() -> None:
    """A periodic service does not run again while the pod stops.

    A later service is still stopping, so its turn to stop has not come, and its next run is due.
    """
    made = engine(p={"kind": "periodic", "every": 10}, late={"needs": ["p"]})
    made.handle("p", Spawned(5, MAIN), 0.0)
    made.handle("late", Spawned(6, MAIN), 0.0)
    made.handle("p", Exited(5, 0), 1.0)
    made.end(5.0, drain=False)
    assert made.tick(12.0) == [] and made.phase.value == "stopping"
    made.handle("late", Exited(6, 0), 13.0)
    assert made.phase is PodPhase.STOPPED


def test_a_required_check_that_fails_keeps_the_pod_from_being_ready() -> None:
    made = engine(
        daemon={},
        check={"kind": "periodic", "every": 10, "required": True, "command": ["/py", "-m", "init.helpers.serving"]},
        other={"kind": "periodic", "every": 10},
        late={"needs": ["check"]},
    )
    for pid, name in enumerate(("daemon", "check", "other", "late"), 5):
        made.handle(name, Spawned(pid, MAIN), 0.0)
    made.handle("check", Exited(6, 0), 1.0)
    assert reasons.pod_reasons(made, 1.0) == () and made.ready_at is not None
    made.tick(12.0)
    made.handle("check", Spawned(9, MAIN), 12.0)
    made.handle("check", Exited(9, 1, last_line="slurmctld is silent"), 12.0)
    made.handle("other", Exited(7, 1), 12.0)
    assert reasons.pod_reasons(made, 13.0, quoting=False) == ("check: slurmctld is silent",)
    shown = {view.name: (view.state, view.ready) for view in reasons.snapshot(made, "p", 13.0).services}
    assert shown["check"] == ("failing", False) and shown["other"] == ("ready", True)
    assert shown["daemon"] == shown["late"] == ("ready", True), "what needs the check goes on"
    assert [text.partition(":")[0] for text in reasons.list_degradations(made, 13.0)] == ["other"]
    made.tick(23.0)
    made.handle("check", Spawned(10, MAIN), 23.0)
    made.handle("check", Exited(10, 0), 23.0)
    assert reasons.pod_reasons(made, 23.0) == ()


def test_a_failing_check_runs_again_at_once_when_a_service_before_it_is_ready_again() -> None:
    made = engine(
        daemon={}, stranger={}, keys={"kind": "periodic", "every": 45, "after": ["daemon"]},
        good={"kind": "periodic", "every": 45, "after": ["daemon"]},
    )  # fmt: skip
    for pid, name in enumerate(("daemon", "stranger", "keys", "good"), 5):
        made.handle(name, Spawned(pid, MAIN), 0.0)
    made.handle("keys", Exited(7, 1, last_line="the key is old"), 1.0)
    made.handle("good", Exited(8, 0), 1.0)

    def runs_after_a_restart_of(name: str, pid: int, now: float) -> set[str]:
        made.again(name, now)
        made.handle(name, Exited(made.states[name].pid, 0), now)
        made.handle(name, Spawned(pid, MAIN), now)
        wake = made.next_wake()
        return {other for other, _ in made.tick(now)} if wake is not None and wake <= now else set()

    assert runs_after_a_restart_of("stranger", 20, 2.0) == set()
    assert runs_after_a_restart_of("daemon", 21, 3.0) == {"keys"}
    made.handle("keys", Spawned(22, MAIN), 3.0)
    assert runs_after_a_restart_of("daemon", 23, 4.0) == set(), "it runs already"
    made.handle("keys", Exited(22, 0), 4.0)
    assert reasons.list_degradations(made, 4.0) == () and runs_after_a_restart_of("daemon", 24, 5.0) == set()


@pytest.mark.parametrize(
    ("command", "end", "shown"),
    [
        (["/py", "-m", "init.helpers.keys"], (1, "the key is old"), "x: the key is old"),
        (["/py", "-m", "init.helpers.keys"], (1, ""), "x: last run exited 1"),
        (["/py", "-m", "init.helpers.keys"], (2, "usage: keys"), "x: last run exited 2: usage: keys"),
        (["/site/check"], (1, "the key is old"), "x: last run exited 1: the key is old"),
    ],
)
def test_a_check_of_minivm_gives_its_reason_itself(command: list[str], end: tuple[int, str], shown: str) -> None:
    made = engine(x={"kind": "periodic", "every": 10, "command": command})
    made.handle("x", Spawned(5, MAIN), 0.0)
    made.handle("x", Exited(5, end[0], last_line=end[1]), 1.0)
    assert reasons.list_degradations(made, 2.0) == (shown,)


def test_the_pod_has_not_stopped_while_a_start_is_on_its_way() -> None:
    made = engine(a={"ready": "notify"})
    made.end(0.0, drain=False)
    assert made.phase.value == "stopping", "the first start was decided and is not reported yet"
    assert not made.still_wanted("a", MAIN)
    made.handle("a", SpawnFailed("no longer wanted"), 0.0)
    assert made.phase is PodPhase.STOPPED and made.ending.exit_code == 0


def test_an_exhausted_critical_service_stops_the_others_first() -> None:
    made = engine(base={}, bad={"needs": ["base"], "restart": {"limit": 0, "fatal-codes": [3], "exhausted": "end-pod"}})
    made.handle("base", Spawned(5, MAIN), 0.0)
    made.handle("bad", Spawned(6, MAIN), 0.0)
    todo = made.handle("bad", Exited(6, 3, last_line="no licence"), 1.0)
    assert ("base", Kill(5, "TERM")) in todo and made.ending.exit_code == 69
    assert str(made.ending.why) == "bad exited 3: no licence; no retry can mend exit code 3"
    made.handle("base", Exited(5, 0), 2.0)
    assert made.phase is PodPhase.STOPPED


def test_a_hurried_stop_ends_the_drain_and_cuts_graces() -> None:
    made = engine(a={"stop": {"grace": 600}})
    made.handle("a", Spawned(5, MAIN), 0.0)
    (spawn,) = made.end(1.0)
    assert spawn == ("drain", Spawn(MAIN)) and made.phase is PodPhase.DRAINING
    made.handle("drain", Spawned(6, MAIN), 1.0)
    todo = made.end(2.0)
    assert ("drain", Kill(6, "TERM")) in todo and ("a", Kill(5, "TERM")) in todo
    assert ("a", Kill(5, "KILL")) in made.tick(3.0)


def test_what_the_drain_says_is_shown_until_it_has_ended() -> None:
    made = engine(a={})
    made.handle("a", Spawned(5, MAIN), 0.0)
    made.drain(1.0)
    made.handle("drain", Spawned(6, MAIN), 1.0)
    assert reasons.snapshot(made, "p", 1.0).drain == "draining"
    made.handle("drain", Notified(status="waiting for 2 jobs: 4711 4712"), 2.0)
    shown = reasons.snapshot(made, "p", 2.0)
    assert shown.drain == "draining: waiting for 2 jobs: 4711 4712"
    assert shown.reasons == (f"drain: {shown.drain}",)
    assert made.ending.drain_state() == "draining", "what is asked for over the socket stays one word"
    made.handle("drain", Exited(6, 0), 3.0)
    assert reasons.snapshot(made, "p", 3.0).drain == "drained"


@pytest.mark.parametrize("back", [(), ("/bin/back",)])
def test_a_drain_that_is_taken_back_while_it_runs_has_not_failed(back: tuple[str, ...]) -> None:
    made = engine(a={})
    assert made.plan.drain is not None
    made.plan = replace(made.plan, drain=replace(made.plan.drain, resume=back))
    made.handle("a", Spawned(5, MAIN), 0.0)
    made.drain(1.0)
    made.handle("drain", Spawned(6, MAIN), 1.0)
    assert ("drain", Kill(6, "TERM")) in made.resume(2.0)
    todo = made.handle("drain", Exited(6, 0, 15), 3.0)
    assert todo == ([("resume", Spawn(MAIN))] if back else [])
    if back:
        made.handle("resume", Spawned(7, MAIN), 3.0)
        made.handle("resume", Exited(7, 0), 4.0)
    assert "drain" not in made.states and made.ending.drain_state() == ""
    assert reasons.pod_reasons(made, 5.0) == ()


def test_a_removed_service_stops_after_those_that_need_it() -> None:
    made = engine(a={}, b={"needs": ["a"]}, c={})
    for name, pid in (("a", 5), ("b", 6), ("c", 7)):
        made.handle(name, Spawned(pid, MAIN), 0.0)
    change, todo = made.apply(compile_plan("worker", [made.specs["c"]]), 1.0)
    assert set(change.removed) == {"a", "b"} and [name for name, action in todo if isinstance(action, Kill)] == ["b"]
    todo = made.handle("b", Exited(6, 0), 2.0)
    assert ("a", Kill(5, "TERM")) in todo
    made.handle("a", Exited(5, 0), 3.0)
    assert set(made.specs) == {"c"} and made.states["c"].pid == 7


def test_a_bug_in_the_order_of_events_is_counted_and_told_and_harms_nothing() -> None:
    made = engine(a={"ready": "notify"})
    made.handle("a", Spawned(5, MAIN), 0.0)
    assert made.handle("a", Spawned(6, MAIN), 1.0) == []
    assert made.impossible == 1 and made.states["a"].pid == 5
    assert ("a: a bug of init itself: Spawned while starting", True) in made.trace.news


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({}, "/run/minivm/control.sock"),
        ({"MINIVM_CONTROL": "/old.sock"}, "/old.sock"),
        ({"MINIVM_CONTROL": "/old.sock", "MINIVM_SOCKET": "/new.sock"}, "/new.sock"),
    ],
)
def test_the_control_socket_has_one_variable_and_an_old_name(
    variables: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINIVM_CONTROL", "MINIVM_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(control_socket()) == path
    with pytest.raises(RequestError, match=path):
        Client().request("status")
