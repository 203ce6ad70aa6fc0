"""The machine's real clock, set two seconds ahead and right again as soon as that was noticed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from tests.process.init_world import World, shell

pytestmark = pytest.mark.root


@pytest.fixture
def offset() -> Iterator[float]:
    """Yield the wall clock's lead over the boot clock, which cannot be set; restore it in the end, whatever happens."""
    before = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    yield before
    set_clock(before)


def set_clock(offset: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_BOOTTIME) + offset)


def test_a_set_clock_is_told_with_its_size(pod: World, offset: float) -> None:
    socket = str(pod.run / "control.sock")
    code = f"from pathlib import Path; from init.helpers.clockwatch import main; main(Path({socket!r}))"
    pod.start(
        {
            "cluster-proof": {"kind": "oneshot", "command": shell("echo proven")},
            "clockwatch": {"command": [sys.executable, "-I", "-c", code], "ready": "notify"},
        }
    )
    pod.until_ready()
    set_clock(offset + 2)
    pod.until(lambda: "clockwatch | the clock was set 2 s ahead, to " in pod.output(), "the jump is told")
    set_clock(offset)
    pod.until(lambda: "clockwatch | the clock was set 2 s back, to " in pod.output(), "and the way back")
    pod.until(lambda: not pod.snapshot().degraded, "nothing is left of it")
    assert pod.service("cluster-proof").starts == 1, "two seconds are nothing to munge"
    assert pod.snapshot().ready
