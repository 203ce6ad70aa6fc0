"""Text of services in messages that every user may read."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.engine.engine import Engine
from init.engine.machine import Trace
from init.engine.states import MAIN, Cause, Exited, Notified, Spawned, SpawnFailed
from init.errors import CannotStart
from init.pid1.spawn.procs import environment
from init.plan.compile import compile_plan
from init.plan.spec import parse_drain, parse_service
from init.view import reasons
from init.view.reasons import cause_text, is_ours

PROOF = ("builtin:cluster-proof",)
DAEMON = ("/usr/sbin/munged",)
GAVE_UP = "gave up after 5 failures within 60 s"


@pytest.mark.parametrize(
    ("cause", "root", "everybody"),
    [
        (Cause("exited 3", "password hunter2"), "exited 3: password hunter2", "exited 3"),
        (Cause("killed by KILL", "a: b: c"), "killed by KILL: a: b: c", "killed by KILL"),
        (Cause("exited 3", "x", verdict=GAVE_UP), f"exited 3: x; {GAVE_UP}", f"exited 3; {GAVE_UP}"),
        (Cause("exited 1", "db; gave up after password hunter2"), "exited 1: db; gave up after password hunter2",
         "exited 1"),
        (Cause("exited 1", "Error: x: No space left on device"), "exited 1: Error: x: No space left on device",
         "exited 1 (No space left on device)"),
        (Cause("exited 1", "fatal: open(/x): Permission denied.", verdict=GAVE_UP),
         f"exited 1: fatal: open(/x): Permission denied.; {GAVE_UP}", f"exited 1 (Permission denied); {GAVE_UP}"),
        (Cause("watchdog: no sign of life for 30 s"),) + ("watchdog: no sign of life for 30 s",) * 2,
        (Cause("not ready within 3 s: tcp ctl:6817 refused", detail="resolves to 10.1.2.3"),)
        + ("not ready within 3 s: tcp ctl:6817 refused (resolves to 10.1.2.3)",) * 2,
        (Cause("exited 1", "key rejected", PROOF),) + ("exited 1: key rejected",) * 2,
        (Cause("exited 1", "key rejected", DAEMON), "exited 1: key rejected", "exited 1"),
        (None, "", ""),
    ],
)  # fmt: skip
def test_a_cause_is_told_by_who_reads_it(cause: Cause | None, root: str, everybody: str) -> None:
    assert (cause_text(cause, quoting=True), cause_text(cause, quoting=False)) == (root, everybody)


@given(st.text(), st.sampled_from(["", GAVE_UP]))
def test_whatever_the_line_it_is_not_repeated(line: str, verdict: str) -> None:
    """Any line is reduced to one of a few fixed sentences for unprivileged readers."""
    shown = cause_text(Cause("exited 1", line, DAEMON, verdict=verdict), quoting=False)
    names = ["", *(f" ({os.strerror(number)})" for number in errno.errorcode)]
    assert shown in {f"exited 1{name}" + (f"; {verdict}" if verdict else "") for name in names}


def engine(**services: dict[str, object]) -> Engine:
    found = [parse_service(name, {"command": list(DAEMON)} | item, "t") for name, item in services.items()]
    made = Engine(compile_plan("worker", found, parse_drain({"command": ["/d"]}, "t")), 30, lambda: 0.5, Trace())
    made.begin(0.0)
    return made


def test_the_words_of_inits_own_steps_are_shown_and_of_the_others_not() -> None:
    prepare = [["/bin/rm", "x"], ["builtin:prepare", "munge-key"]]
    steps: dict[str, object] = {"prepare": prepare, "restart": {"when": "never"}}
    made = engine(a=steps, b=steps)
    made.handle("a", Spawned(5, 0), 0.0)
    made.handle("a", Exited(5, 1, last_line="hunter2"), 0.0)
    made.handle("b", Spawned(6, 0), 0.0)
    made.handle("b", Exited(6, 0), 0.0)
    made.handle("b", Spawned(7, 1), 0.0)
    made.handle("b", Exited(7, 1, last_line="no key is mounted"), 0.0)
    shown = reasons.pod_reasons(made, 1.0, quoting=False)
    assert shown == ("a: /bin/rm (prepare) exited 1", "b: builtin:prepare (prepare) exited 1: no key is mounted")
    assert reasons.pod_reasons(made, 1.0)[0] == "a: /bin/rm (prepare) exited 1: hunter2"


def test_a_drain_is_a_service_like_another() -> None:
    """The drain's text is hidden like a service's.

    Regression: its status and the last line of a failed drain were shown to every user.
    """
    made = engine(a={"ready": "notify"})
    made.handle("a", Spawned(5, MAIN), 0.0)
    made.handle("a", Notified(ready=True), 0.0)
    made.drain(1.0)
    made.handle("drain", Spawned(6, MAIN), 1.0)
    made.handle("drain", Notified(status="asks with hunter2"), 1.0)
    assert reasons.drain_text(made) == "draining: asks with hunter2"
    assert reasons.pod_reasons(made, 1.0, quoting=False) == ("drain: draining",)
    made.handle("drain", Exited(6, 1, last_line="hunter2 is wrong"), 2.0)
    assert reasons.drain_text(made) == "failed: exited 1: hunter2 is wrong"
    assert reasons.snapshot(made, "pod", 2.0, quoting=False).drain == "failed: exited 1"


def test_what_a_service_file_holds_is_not_told_when_it_cannot_be_filled_in() -> None:
    spec = parse_service("a", {"command": list(DAEMON), "environment": {"URL": "db://me:hunter2@${NOT_SET}"}}, "t")
    with pytest.raises(CannotStart, match="hunter2") as caught:
        environment(spec, {})
    made = engine(a={"restart": {"when": "never"}})
    made.handle("a", SpawnFailed(caught.value.why, caught.value.quoted), 0.0)
    assert reasons.pod_reasons(made, 0.0, quoting=False) == ("a: ${NOT_SET} is not set",)
    assert "hunter2" in reasons.pod_reasons(made, 0.0)[0]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (PROOF, True),
        (["/opt/minivm/bin/python3", "-I", "-m", "health.broker"], True),
        (["/opt/minivm/bin/python3", "-I", "-m", "health.checks.builtin"], True),
        (["/usr/bin/gitsync", "loop"], False),
        (["/opt/minivm/bin/python3", "-I", "-m", "health.checks.loop"], False),
        (["/opt/minivm/bin/python3", "-I", "-m", "init.people.removed_jobs"], True),
        (["/opt/minivm/bin/python3", "-I", "-m", "init.people.keep"], False),
        (["/opt/minivm/bin/python3", "-I", "-m", "init.people.keep", "--boot"], False),
        (["/bin/sh", "-m"], False),
        ((), False),
    ],
)
def test_whose_program_it_is(command: list[str], ours: bool) -> None:
    assert is_ours(tuple(command)) is ours
