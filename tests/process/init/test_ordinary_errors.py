"""Ordinary errors, each of which has ended a pod once: they fail the service, connection or request they are of."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from init.errors import RequestError
from tests.process.init_world import NOTIFIES, World, python

pytestmark = pytest.mark.root
WELL = {"command": NOTIFIES, "ready": "notify"}


def lives(pod: World) -> None:
    """PID 1 answers, the other service runs on, and the end is an orderly one."""
    assert pod.get("/livez") == (200, "ok\n")
    pod.until_state("well", "ready")
    assert pod.stop() == 0, pod.output()
    assert "Traceback" not in pod.output()


def test_a_probe_that_cannot_be_started_is_its_services_trouble(pod: World) -> None:
    """A typo in a drop-in's probe: every pod that mounts it ended, for ever."""
    pod.start({"a": {"command": ["/bin/sleep", "1000"], "ready": {"exec": ["/no/such/probe"]}}, "well": WELL})
    pod.until_state("well", "ready")
    pod.until(lambda: "/no/such/probe: No such file" in str(pod.service("a").reasons), "it says why")
    assert pod.service("a").state == "starting"
    assert pod.get("/readyz")[0] == 503
    lives(pod)


def test_a_probe_that_can_be_started_again_is(pod: World, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    pod.start({"a": {"command": ["/bin/sleep", "1000"], "ready": {"exec": [str(probe)]}}, "well": WELL})
    pod.until(lambda: "No such file" in str(pod.service("a").reasons), "it says why")
    fresh = tmp_path / "fresh"
    fresh.write_text("#!/bin/sh\nexit 0\n")
    fresh.chmod(0o755)
    fresh.rename(probe)
    pod.until_ready()
    lives(pod)


def test_a_reload_that_cannot_be_started_is_the_requests_trouble(pod: World) -> None:
    pod.start({"a": WELL | {"reload": {"command": ["/no/such/reload"]}}, "well": WELL})
    pod.until_ready()
    with pytest.raises(RequestError, match=r"reload a: .*/no/such/reload: No such file"):
        pod.ask("reload", service="a")
    with pod.client() as client:  # on one connection: the request after the one that failed is answered
        with pytest.raises(RequestError):
            client.request("reload", service="a")
        assert client.request("why")["ready"] is True
    assert pod.service("a").ready
    lives(pod)


# In a user namespace of its own, a process may set the limits of that namespace alone.
OWN_LIMITS = """
import ctypes, os, sys, time
assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0
open('/proc/self/uid_map', 'w').write('0 0 1')
open('/proc/sys/user/max_inotify_%s', 'w').write('%d')
from init.pid1.start import end, main
end(main(sys.argv[1:], time.monotonic()))
"""


@pytest.mark.parametrize(("what", "number"), [("instances", 0), ("watches", 0)])
def test_without_inotify_a_path_is_asked_for_again_and_again(
    pod: World, tmp_path: Path, what: str, number: int
) -> None:
    """128 instances by default, shared by all of root's pods on the host; and another number of watches."""
    entry = tmp_path / "entry.py"
    entry.write_text(OWN_LIMITS % (what, number))
    mark = tmp_path / "deep" / "mark"
    pod.start(
        {"a": {"command": ["/bin/sleep", "1000"], "ready": {"file": str(mark), "interval": "50ms"}}, "well": WELL},
        entry=["-I", str(entry)],
    )
    pod.until_state("well", "ready")
    pod.until(lambda: "no inotify" in str(pod.service("a").reasons), "it says that nothing can be watched")
    assert f"file {mark} missing" in str(pod.service("a").reasons)
    mark.parent.mkdir()
    mark.touch()
    pod.until_ready()
    lives(pod)


def test_a_deadline_of_months_is_waited_for(pod: World) -> None:
    """epoll counts milliseconds in 31 bits: 24.8 days."""
    pod.start({"a": {"kind": "periodic", "command": ["/bin/true"], "every": "60d"}, "well": WELL})
    pod.until(lambda: pod.service("a").last_exit == "exited 0", "it ran")
    pod.ask("condition", name="far", text="away", expires=9e9)
    lives(pod)


NO_FORK = """
import errno, os, sys, time
spawn, asked = os.posix_spawn, 0
def scarce(path, *rest, **named):
    global asked
    if path == '/bin/sleep':
        asked += 1
        if asked <= 5:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
    return spawn(path, *rest, **named)
os.posix_spawn = scarce
from init.pid1.start import end, main
end(main(sys.argv[1:], time.monotonic()))
"""


def test_a_machine_without_room_for_a_process_uses_up_nobodys_restarts(pod: World, tmp_path: Path) -> None:
    """A fork bomb of a job's: pids.max is reached, and PID 1 itself gets EAGAIN."""
    entry = tmp_path / "entry.py"
    entry.write_text(NO_FORK)
    restart = {"limit": 2, "delay": "20ms", "max-delay": "50ms", "exhausted": "end-pod"}
    pod.start({"a": {"command": ["/bin/sleep", "1000"], "restart": restart}, "well": WELL}, entry=["-I", str(entry)])
    pod.until_ready()
    assert (pod.service("a").starts, pod.service("a").failures) == (1, 5)
    assert "cannot start a: /bin/sleep: Resource temporarily unavailable" in pod.output()
    lives(pod)


def test_a_drain_that_finds_no_room_for_a_process_is_begun_again(pod: World, tmp_path: Path) -> None:
    """Were it given up, a job's fork bomb would end the jobs of others with the pod."""
    entry = tmp_path / "entry.py"
    entry.write_text(NO_FORK)
    pod.start({"well": WELL}, {"command": ["/bin/sleep", "0"], "budget": 20}, entry=["-I", str(entry)])
    pod.until_ready()
    assert pod.ask("drain")["drain"] == "drained"
    assert "cannot start drain: /bin/sleep: Resource temporarily unavailable" in pod.output()
    lives(pod)


def test_a_drain_that_never_finds_room_leaves_the_services_their_time(pod: World, tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(NO_FORK.replace("asked <= 5", "True"))
    pod.start({"well": WELL}, {"command": ["/bin/sleep", "0"], "budget": 20}, entry=["-I", str(entry)])
    pod.until_ready()
    assert pod.ask("drain", wait=False)["drain"] == "draining"
    assert pod.stop() == 0, "nothing had to be killed"


@pytest.mark.parametrize("text", ["\\u00b2", "9" * 4000, "\\u0663", "1e9", "-1"])
def test_a_mainpid_that_is_no_number_is_not_believed(pod: World, text: str) -> None:
    says = python(f"tell('READY=1\\nMAINPID={text}')\nsignal.pause()")
    pod.start({"a": {"command": says, "ready": "notify"}, "well": WELL})
    pod.until_ready()
    lives(pod)


def test_what_is_nested_too_deeply_is_refused(pod: World) -> None:
    pod.start({"well": WELL})
    pod.until_ready()
    requests = [
        "[" * 100_000,
        '{"op":' * 50_000,
        '{"op": "apply", "plan": ' + '{"a":' * 900 + "1" + "}" * 901,
        '{"op": "condition", "name": "a", "text": "b", "expires": 1' + "0" * 400 + "}",
        '{"op": "condition", "name": "a", "text": "b", "expires": NaN}',
        '{"op": "condition", "name": "a", "text": "b", "expires": ' + "9" * 5000 + "}",
        '{"op": "why"}',
    ]
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(pod.run / "control.sock"))
        lines = caller.makefile()
        replies = []
        for text in requests:
            caller.sendall(f"{text}\n".encode())
            replies.append(json.loads(lines.readline())["ok"])
    assert replies == [False] * 6 + [True]
    lives(pod)


def test_half_a_letter_keeps_no_page_from_being_told(pod: World) -> None:
    pod.start({"well": WELL})
    pod.until_ready()
    pod.ask("condition", name="a", text="half \ud800", blocking=True)
    assert pod.get("/readyz") == (503, "a: half \\ud800\n")
    assert pod.get("/status")[0] == pod.get("/metrics")[0] == 200


def test_an_accept_without_descriptors_is_no_busy_loop(pod: World) -> None:
    """Callers wait in the kernel's queue until there is one; PID 1 says so, and does not spin meanwhile."""
    import resource

    pod.start({"well": WELL})
    pod.until_ready()
    before = resource.prlimit(pod.pid, resource.RLIMIT_NOFILE)
    callers = []

    def told() -> bool:
        """With one caller more each time: a descriptor of PID 1's that closes meanwhile makes room for one."""
        held = {int(path.name) for path in Path(f"/proc/{pod.pid}/fd").iterdir()}
        free = next(number for number in range(len(held) + 1) if number not in held)
        resource.prlimit(pod.pid, resource.RLIMIT_NOFILE, (free, before[1]))
        callers.append(socket.create_connection(("127.0.0.1", pod.port)))
        callers[-1].sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        return "trouble: StatusServer._accept: Too many open files" in pod.output()

    pod.until(told, "it is told")
    turns, began = pod.wakeups(), time.monotonic()
    pod.until(lambda: time.monotonic() - began > 1, "a second has passed")
    assert pod.wakeups() - turns < 60 * (time.monotonic() - began)
    resource.prlimit(pod.pid, resource.RLIMIT_NOFILE, before)
    for caller in callers:
        assert b"200 OK" in caller.recv(4096)
        caller.close()
    lives(pod)


def test_a_machine_that_has_nothing_to_give_is_told_at_once(pod: World) -> None:
    """Before anything is started: one message, and a code of its own."""
    pod.write_plan({"well": WELL})
    entry = pod.directory / "entry.py"
    entry.write_text(
        "import os, resource, sys, time\nimport init.pid1.loop, init.pid1.logs\n"
        "from init.pid1.start import end, main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\nend(main(sys.argv[1:], time.monotonic()))\n"
    )
    pod.start(entry=["-I", str(entry)])
    assert pod.ended() == 71, pod.output()
    assert pod.output() == "minivm: cannot begin: Too many open files\n"
