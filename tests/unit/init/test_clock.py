"""Clock jumps: how init reports them, and the offset from the controller's clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from init.helpers.clockwatch import Clock, jump_text
from init.pid1.serve.server import StatusServer, listen
from init.pid1.wait import Poller
from init.slurm.client import explain_clock, judge, measure_clock_lead, parse_date

NOON = 1_763_640_000.0
REFUSED = "slurm_load_node error: Protocol authentication error"


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (3600.0, "set 3,600 s ahead, to 2025-11-20 12:00:00 UTC"),
        (-3600.4, "set 3,600 s back, to 2025-11-20 12:00:00 UTC"),
        (0.9, ""),
        (-0.9, ""),
        (0.0, ""),
    ],
)
def test_a_jump_is_told_with_its_size(by: float, text: str) -> None:
    assert jump_text(by, NOON) == text


def test_a_clock_that_is_set_back_right_is_where_it_was() -> None:
    clock = Clock(NOON).after(NOON + 3600).after(NOON + 0.2)
    assert clock.moved == pytest.approx(0.2)


def test_only_what_munge_may_mind_is_proven_again() -> None:
    clock = Clock(NOON).after(NOON + 40)
    assert not clock.doubtful
    clock = clock.after(NOON + 80)
    assert clock.doubtful, "in all"
    clock = Clock(clock.offset, clock.moved, proven=clock.moved)
    assert not clock.doubtful
    assert not clock.after(NOON + 30).doubtful
    assert clock.after(NOON).doubtful, "the way back is a jump too"


def test_slurms_own_credentials_live_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVM_AUTH", "slurm")
    assert Clock(NOON).after(NOON + 12).doubtful and not Clock(NOON).after(NOON + 11).doubtful
    assert explain_clock(61.0) == "this node's clock is 61 s ahead of the controller's" and not explain_clock(57.0)
    assert judge(REFUSED, "ctl:6817") == "slurm key rejected by ctl:6817"


@pytest.mark.parametrize(
    ("ahead", "text"),
    [
        (3600.0, "munge credential refused by ctl:6817: this node's clock is 3,600 s ahead of the controller's"),
        (-301.0, "munge credential refused by ctl:6817: this node's clock is 301 s behind the controller's"),
        (200.0, "munge key rejected by ctl:6817"),
        (0.0, "munge key rejected by ctl:6817"),
    ],
)
def test_a_refused_credential_is_the_keys_fault_only_when_the_clocks_agree(ahead: float, text: str) -> None:
    assert judge(REFUSED, "ctl:6817", explain_clock(ahead)) == text


def test_other_complaints_are_not_the_clocks_fault() -> None:
    assert judge("Connection refused", "ctl:6817", explain_clock(4000.0)) == "ctl:6817 cannot be reached"


@pytest.mark.parametrize(
    ("answer", "date"),
    [
        (b"HTTP/1.1 200 OK\r\nDate: Thu, 20 Nov 2025 12:00:00 GMT\r\n\r\n", NOON),
        (b"HTTP/1.1 200 OK\r\ndate:Thu, 20 Nov 2025 12:00:00 GMT\r\n", NOON),
        (b"HTTP/1.1 200 OK\r\nDate: yesterday\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n\r\nDate: Thu, 20 Nov 2025 12:00:00 GMT\r\n", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_the_date_of_an_answer(answer: bytes, date: float | None) -> None:
    assert parse_date(answer) == date


@pytest.fixture
def controller() -> Iterator[int]:
    """Serve init's real HTTP server on a free port."""
    poller = Poller()
    server = StatusServer(poller, listen("127.0.0.1:0")[0], lambda path: (200, "text/plain", "ok\n"))
    end, ended = os.pipe()
    over = threading.Event()
    poller.add(end, 1, lambda _: over.set())

    def serve() -> None:
        while not over.is_set():
            poller.wait(None)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.address[1]
    os.write(ended, b"x")
    thread.join()
    server.close()
    os.close(end)
    os.close(ended)


def test_the_controllers_init_tells_its_time(controller: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_clock_lead("127.0.0.1:6817", controller)
    assert found is not None and abs(found) < 5
    real = time.time
    monkeypatch.setattr("init.slurm.client.time.time", lambda: real() + 7200)
    found = measure_clock_lead("127.0.0.1", controller)
    assert found is not None and "7,20" in explain_clock(found)


def test_a_controller_without_http_tells_nothing(controller: int) -> None:
    assert measure_clock_lead("127.0.0.1", 1) is None
