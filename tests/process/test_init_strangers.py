"""What whoever runs a process in the pod may try against PID 1: each is met by the real PID 1 and real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.init_world import NOTIFIES, World, python, world

pytestmark = pytest.mark.root


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


SAYS = """
def says(text):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.connect(%r)
    s.send(text.encode())
"""


def test_a_number_that_is_used_again_speaks_for_nobody_else(pod: World, tmp_path: Path) -> None:
    """A service ends, and a process of somebody else gets its number and begins a session, as any daemon does."""
    again = """
number = int(open(%r).read())
for _ in range(10000):
    open('/proc/sys/kernel/ns_last_pid', 'w').write(str(number - 1))
    if pid := os.fork():
        if pid == number: break
        os.waitpid(pid, 0)
    elif os.getpid() == number:
        os.setsid()
        says('<13>x[1]: spoken as ' + str(number))
        signal.pause()
    else:
        os._exit(0)
signal.pause()
"""
    note = tmp_path / "number"
    pod.start(
        {
            "victim": {"kind": "oneshot", "command": python(f"open({str(note)!r}, 'w').write(str(os.getpid()))")},
            "thief": {
                "command": python(SAYS % str(tmp_path / "log") + again % str(note)),
                "needs": ["victim"],
            },
            "last": {"command": NOTIFIES, "ready": "notify"},
        }
    )
    pod.until(lambda: "spoken as" in pod.output(), "the number was given away again, and its new owner speaks")
    (line,) = [line for line in pod.output().splitlines() if "spoken as" in line]
    assert line.startswith("thief | ")
