"""Replacements for parts of the standard library in PID 1, each compared with the original."""

from __future__ import annotations

import copy
import enum
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.engine.states import Phase, signal_name
from init.fields import duration, expand
from init.lean import Choice, read_json
from init.pid1 import logs
from init.pid1.spawn import procs
from init.plan.service import Probe

ROOT = Path(__file__).resolve().parents[3]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.sampled_from(["", "\n", "  \n"]))
def test_json_is_read_as_json_reads_it(value: object, after: str) -> None:
    for indent in (None, 1):
        assert read_json(json.dumps(value, indent=indent) + after) == value


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "[1,]", "nul", '{"a": 1} x', '"\n"', "{1: 2}", "\ufeff{}"])
def test_what_is_not_json_is_refused_in_the_words_of_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as wanted:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as found:
        read_json(text)
    assert str(found.value) == str(wanted.value)


def test_json_that_json_alone_takes() -> None:
    assert read_json(' \n{"a": 1}') == {"a": 1}


def test_a_choice_is_an_enum_to_those_who_use_it() -> None:
    class Real(enum.Enum):
        ONE = "one"
        TWO = "two"

    class Ours(Choice):
        ONE = "one"
        TWO = "two"

    for kind in (Real, Ours):
        assert [(item.name, item.value) for item in kind] == [("ONE", "one"), ("TWO", "two")]
        assert kind("two") is kind.TWO
        assert {kind.ONE: 1}[kind("one")] == 1
        assert kind.ONE != kind.TWO
        assert isinstance(kind.ONE, kind)
        with pytest.raises(ValueError, match="three"):
            kind("three")
        with pytest.raises(AttributeError):
            kind.ONE.value = "other"  # type: ignore[misc]
    assert len(Ours) == 2


def test_a_choice_stays_itself_when_it_is_copied() -> None:
    assert copy.deepcopy(Phase.READY) is Phase.READY
    assert pickle.loads(pickle.dumps(Probe.NOTIFY)) is Probe.NOTIFY


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("10", 10), ("1.5", 1.5), (" 500ms ", 0.5), ("2 m", 120), ("1h", 3600), ("1d", 86400), ("0", 0),
        ("", None), ("s", None), ("1.", None), (".5", None), ("1e3", None), ("-1s", None), ("1s2", None),
        ("1 ss", None), ("1sm", None), ("\u00b2s", None), ("inf", None),
    ],
)  # fmt: skip
def test_durations(text: str, wanted: float | None) -> None:
    assert duration(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", "plain"), ("${A}", "a"), ("x${A}y${B1}z", "xaybz"), ("${E}", ""), ("${E:-d}", "d"),
        ("${N:-d}", "d"), ("${N:-}", ""), ("${A:-d}", "a"), ("${N:-a:-b $ {}", "a:-b $ {"), ("$$", "$"),
        ("$${A}", "${A}"), ("$$$$", "$$"), ("$", "$"), ("$A", "$A"), ("${}", "${}"), ("${1A}", "${1A}"),
        ("${a-b}", "${a-b}"), ("${A", "${A"), ("a$", "a$"), ("${A}}", "a}"), ("${ A}", "${ A}"), ("$${", "${"),
    ],
)  # fmt: skip
def test_variables(text: str, wanted: str) -> None:
    assert expand(text, {"A": "a", "B1": "b", "E": ""}) == wanted


def test_a_variable_without_value_or_default_is_named() -> None:
    with pytest.raises(KeyError, match="NOT_THERE"):
        expand("x ${NOT_THERE} y", {})


def test_pid_1_reaches_its_first_service_without_what_is_slow_to_load(tmp_path: Path) -> None:
    """The real entrypoint reaches its first service with all slow imports refused."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "role": "r", "services": {"a": {"command": ["/bin/x", "${PATH}"]}}}')
    slow = ["enum", "re", "json", "signal", "collections", "functools", "dataclasses", "typing", "pathlib", "socket"]
    slow += ["errno", "heapq"]
    code = f"""
import os, sys, time
sys.path.append({str(ROOT)!r})
for name in {slow!r}: sys.modules[name] = None
def reached(path, *_, **__):
    os.write(1, path.encode()); os._exit(0)
os.posix_spawn = reached
from init.pid1.spawn import procs; from init.pid1 import start
procs.is_pid_1 = lambda: True
start.main(["--plan", {str(plan)!r}], time.monotonic())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={"PATH": os.environ["PATH"], "MINIVM_RUN": str(tmp_path / "run"), "MINIVM_SYSLOG": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "/bin/x", done.stderr


def test_a_restart_loads_nothing(tmp_path: Path) -> None:
    """Between a service's exit and its next start PID 1 imports nothing, because an import would delay the restart."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "role": "r", "services": {"a": {"command": ["/bin/sleep", "1000"]}}}')
    loaded = tmp_path / "loaded"
    code = f"""
import os, sys, time
sys.path.append({str(ROOT)!r})
from init.pid1.wait import Poller; from init.pid1.spawn import procs; from init.pid1 import start
before = set()
wait, spawn = Poller.wait, os.posix_spawn
def waits(self, until):
    before.update(sys.modules)
    wait(self, until)
def spawned(*arguments, **named):
    if before:
        open({str(loaded)!r}, "w").write(" ".join(set(sys.modules) - before)); os._exit(0)
    pid = spawn(*arguments, **named)
    os.kill(pid, 9)
    return pid
Poller.wait, os.posix_spawn = waits, spawned
procs.is_pid_1 = lambda: True
start.main(["--plan", {str(plan)!r}], time.monotonic())
"""
    env = {"PATH": os.environ["PATH"], "MINIVM_RUN": str(tmp_path / "run"), "MINIVM_SYSLOG": "", "MINIVM_HTTP": ""}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert loaded.read_text() == ""


def test_errors_have_the_numbers_of_their_names() -> None:
    assert procs.SCARCE == (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR)
    assert logs.GONE == (errno.EPIPE, errno.EBADF)


def test_signals_are_called_what_python_calls_them() -> None:
    for number in signal.valid_signals():
        known = number in iter(signal.Signals)
        assert signal_name(number) == (signal.Signals(number).name.removeprefix("SIG") if known else str(int(number)))
