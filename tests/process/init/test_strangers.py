"""Attacks on PID 1 by a process in the pod, each met by the real PID 1 and real processes."""

from __future__ import annotations

import platform
import re
import secrets
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.process.init_world import NOTIFIES, PYTHON, World, python
from tests.waiting import PATIENCE

pytestmark = pytest.mark.root


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


OLD = """
import sys, time
from init.pid1 import notify
from init.pid1.start import end, main
notify.SO_PASSRIGHTS = 1 << 20  # as on a kernel that does not know it
end(main(sys.argv[1:], time.monotonic()))
"""

# A connection that nobody reads, with so much unsent that a close of it waits for an hour. Who holds the other end
# lives on; `attach` sends it, and keeps nothing of it.
LINGERS = """
import struct, threading
def lingers():
    here, there = socket.socket(), socket.socket()
    here.bind(("127.0.0.1", 0)); here.listen()
    there.connect(here.getsockname())
    other, _ = here.accept()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    there.setblocking(False)
    try:
        while True: there.send(b"x" * 65536)
    except BlockingIOError: pass
    return there, other
kept = []
def attach(path, text, count=1):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.connect(path)
    ends = [lingers() for _ in range(count)]
    kept.extend(ends)
    try: socket.send_fds(s, [text], [end.fileno() for end, _ in ends])
    except PermissionError: return print("refused")
    print("attached")
    for end, _ in ends:  # what is left is the message's; if it has been taken already, the last close is this one
        threading.Thread(target=end.close, daemon=True).start()
"""
STRANGER = {"user": "nobody", "ready": "none"}
SPEAKS = SAYS + "signal.signal(signal.SIGUSR1, lambda *_: says('<13>x[1]: afterwards'))\n"


@pytest.fixture(params=["refuses", "cannot refuse"])
def entry(request: pytest.FixtureRequest, tmp_path: Path) -> list[str] | None:
    """PID 1 on a kernel that refuses attached descriptors, where this one does, and on an older one."""
    if request.param == "refuses":
        return None
    (tmp_path / "old.py").write_text(OLD)
    return ["-I", str(tmp_path / "old.py")]


@pytest.mark.parametrize("count", [1, 100])
def test_a_descriptor_that_takes_an_hour_to_close_is_nobodys_hour(
    pod: World, entry: list[str] | None, count: int
) -> None:
    """PID 1 does not wait in the close of a descriptor that lingers.

    Any user attaches lingering connections to log messages and keeps no copy. The process that makes the last close
    waits until it ends; the kernel closes them for a receiver that has no room for them.
    """
    log = str(pod.run / "log")
    code = LINGERS + f"for _ in range(3): attach({log!r}, b'<13>x[1]: mine', {count})\nsignal.pause()"
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "speaks": {"command": python(SPEAKS % log + "while True: signal.pause()")},
            "stranger": STRANGER | {"command": python(code)},
        },
        entry=entry,
        MINIVM_SYSLOG=log,
    )
    pod.until(lambda: pod.output().count("attached") + pod.output().count("refused") == 3, "he has tried three times")
    pod.until_ready()
    before = pod.service("a").pid
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: pod.service("a").pid not in (0, before) and pod.service("a").ready, "PID 1 supervises")
    assert pod.get("/livez")[0] == 200
    pod.ask("signal", service="speaks", signal="USR1")
    pod.until(lambda: "speaks | x[1]: afterwards" in pod.output(), "and others' lines arrive")
    assert pod.service("stranger").state == "ready", "he still waits for his hour"


def test_a_service_cannot_hold_pid_1_by_a_descriptor_either(pod: World) -> None:
    """A process with a service's user may attach descriptors to notifications; a barrier is one.

    The message with it counts, and PID 1 reads the messages after it before it judges a death.
    """
    code = LINGERS + "attach(os.environ['NOTIFY_SOCKET'], b'READY=1\\nSTATUS=attached', 3)\ntell('STATUS=after')\n"
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "slow": {"command": python(code + "signal.pause()"), "ready": "notify", "user": "nobody"},
        }
    )
    pod.until_ready()
    pod.until(lambda: pod.service("slow").status == "after", "what came behind it is read")
    before = pod.service("a").pid
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: pod.service("a").pid not in (0, before) and pod.service("a").ready, "PID 1 supervises")
    assert pod.get("/livez")[0] == 200


def test_a_word_may_start_the_first_service_of_another_user(pod: World) -> None:
    """Its own socket is opened while the word is still being read."""
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "b": {"command": NOTIFIES, "ready": "notify", "user": "nobody", "needs": ["a"]},
        }
    )
    pod.until_ready()


def test_the_last_word_counts_though_a_descriptor_came_before_it(pod: World) -> None:
    """A service says who takes over and ends as if it had failed, while another's barrier is being answered."""
    barrier = (
        "def barrier():\n    left, end = os.pipe()\n"
        "    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:\n"
        "        s.connect(os.environ['NOTIFY_SOCKET'])\n"
        "        socket.send_fds(s, [b'BARRIER=1'], [end])\n"
        "    os.close(end); os.read(left, 1)\n"
    )
    flood = barrier + "tell('READY=1')\nwhile True: barrier()"
    code = (
        "def serve():\n    signal.signal(signal.SIGUSR1, replace)\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n    while True: signal.pause()\n"
        "def replace(*_):\n    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "    if (pid := os.fork()) == 0: serve()\n    tell(f'MAINPID={pid}'); os._exit(1)\n"
        "tell('READY=1')\nserve()"
    )
    pod.start(
        {
            "flood": {"command": python(flood), "ready": "notify"},
            "slurmd": {"command": python(code), "ready": "notify", "needs": ["flood"]},
        }
    )
    pod.until_ready()
    pids = {pod.service("slurmd").pid}
    for count in range(30):
        pod.ask("signal", service="slurmd", signal="USR1")
        pod.until(lambda: pod.service("slurmd").pid not in {*pids, 0}, f"hand-over {count}")
        pids.add(pod.service("slurmd").pid)
    view = pod.service("slurmd")
    assert (view.starts, view.failures) == (1, 0)


def test_a_users_line_is_not_taken_for_sshds(pod: World) -> None:
    """A login's output descends from sshd; the log puts the user's name before the claimed one."""
    log = str(pod.run / "log")
    forged = "<86>Jan  1 00:00:00 sshd[1]: Accepted publickey for root\\x1b[2K\\rsshd | sshd[1]: true"
    code = SAYS % log + (
        "says('<86>Jan  1 00:00:00 sshd[7]: Accepted publickey for ann')\n"
        f"if os.fork() == 0:\n    os.setsid(); os.setuid(65534); says('{forged}')\nsignal.pause()"
    )
    pod.start({"sshd": {"command": python(code)}}, MINIVM_SYSLOG=log)
    pod.until(lambda: "for root" in pod.output(), "both lines are there")
    assert "sshd | sshd[7]: Accepted publickey for ann\n" in pod.output()
    assert "sshd | uid 65534: sshd[1]: Accepted publickey for root?[2K?sshd | sshd[1]: true\n" in pod.output()
    assert pod.ask("logs", service="sshd", lines=1)["lines"][0].startswith("uid 65534: "), "root is told, too"


def test_a_user_cannot_fill_the_log(pod: World) -> None:
    """A user writes a hundred megabytes, as fast as they go; then root writes a line.

    The log keeps a limited amount of the user's lines a second and says how many it dropped; root's line is there.
    """
    log = str(pod.run / "log")
    flood = "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    flood += f"s.connect({log!r})\nfor n in range(2000): s.send(b'<13>flood[1]: ' + b'x' * 50000)\nprint('sent')\n"
    pod.start(
        {
            "stranger": STRANGER | {"command": python(flood + "signal.pause()")},
            "speaks": {"command": python(SPEAKS % log + "while True: signal.pause()")},
        },
        MINIVM_SYSLOG=log,
    )
    pod.until(lambda: "stranger | sent" in pod.output(), "it is sent")
    pod.ask("signal", service="speaks", signal="USR1")
    pod.until(lambda: "speaks | x[1]: afterwards" in pod.output(), "root's line is there")
    pod.until(lambda: "of uid 65534: more than 64 KiB/s" in pod.output(), "what was dropped is told")
    assert len(pod.output()) < 5 << 20


def test_idle_callers_keep_nobody_out(pod: World) -> None:
    """Three times as many idle connections as PID 1 keeps do not block a real request.

    They ask nothing or half a question, and more come for each one that is closed. Every real request gets its
    answer, each time.
    """
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    held: list[socket.socket] = []
    try:
        for turn in range(10):
            for number in range(200 if not turn else 64):
                held.append(socket.create_connection(("127.0.0.1", pod.port), timeout=PATIENCE))
                if number % 2:
                    held[-1].send(b"GET /livez HTTP/1.1\r\nHost: ")
            assert pod.get("/livez") == (200, "ok\n")
            assert pod.get("/readyz") == (200, "ok\n")
    finally:
        for caller in held:
            caller.close()


def test_who_asks_half_a_question_is_hung_up_on(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    with socket.create_connection(("127.0.0.1", pod.port), timeout=PATIENCE) as slow:
        slow.send(b"GET /livez")
        assert slow.recv(100) == b"", "without an answer"


def ask(host: str, port: int) -> int:
    with urllib.request.urlopen(f"http://{host}:{port}/livez", timeout=PATIENCE) as reply:
        status: int = reply.status
    return status


def cable(pod: World) -> str:
    """Between this machine, which is the node, and a pod with a network of its own; the pod's address."""
    enter, net = ["nsenter", "-t", str(pod.pid), "-n"], secrets.randbelow(1 << 14)
    here, there = (f"198.18.{net >> 6}.{(net & 63) << 2 | end}" for end in (1, 2))
    name = f"mv{secrets.token_hex(4)}"
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "eth0", "netns", str(pod.pid)], check=True)
    for prefix, device, address in (([], name, here), (enter, "eth0", there)):
        subprocess.run([*prefix, "ip", "addr", "add", f"{address}/30", "dev", device], check=True)
        subprocess.run([*prefix, "ip", "link", "set", device, "up"], check=True)
    subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
    return there


def test_the_kubelets_port_is_open_to_the_node_and_to_nobody_in_the_pod(pod: World) -> None:
    """A pod with a network of its own, as a kubelet meets it: from the node's end of its cable.

    Inside the pod the port seems not to exist, by whichever address; the other port is open to everybody.
    """
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        network=True,
        MINIVM_HTTP="0.0.0.0:8650",
        MINIVM_PROBES="0.0.0.0:8651",
    )
    pod.until_ready()
    enter, there = ["nsenter", "-t", str(pod.pid), "-n"], cable(pod)
    pod.until(lambda: ask(there, 8651) == 200, "the node's question is answered")
    inside = "import socket, sys\nsocket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)"
    for address in ("127.0.0.1", there):
        for port, wanted in ((8650, ""), (8651, "TimeoutError")):
            done = subprocess.run(
                [*enter, PYTHON, "-c", inside, address, str(port)], capture_output=True, text=True, check=False
            )
            assert wanted in done.stderr and bool(done.returncode) is bool(wanted), done.stderr
    assert ask(there, 8651) == 200


# PID 1, where no process may attach a filter to a socket: what some sandboxes and kernels refuse.
NO_FILTERS = """
import ctypes, os, struct, sys
steps = [(0x20, 0, 0, 0), (0x15, 0, 3, int(sys.argv[1])), (0x20, 0, 0, 32), (0x15, 0, 1, 26),
         (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)
program = struct.pack("HP", len(steps), ctypes.addressof(filters))
assert not libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0), ctypes.get_errno()
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
SETSOCKOPT = {"x86_64": "54", "aarch64": "208"}


def test_where_the_kernel_refuses_the_filter_it_is_told_and_jobs_are_hung_up_on(pod: World) -> None:
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        entry=["-c", NO_FILTERS, SETSOCKOPT[platform.machine()], "-I", "-m", "init"],
        network=True,
        MINIVM_HTTP="0.0.0.0:8650",
        MINIVM_PROBES="0.0.0.0:8651",
    )
    told = pod.until_ready()
    enter, there = ["nsenter", "-t", str(pod.pid), "-n"], cable(pod)
    assert any("probe port: the kernel refuses the filter" in reason for reason in told.degraded), told.degraded
    pod.until(lambda: ask(there, 8651) == 200, "the node's question is answered")
    inside = "import sys, urllib.request\nurllib.request.urlopen(sys.argv[1], timeout=60)"
    for address in ("127.0.0.1", "127.0.0.7", there):
        for port, wanted in ((8650, ""), (8651, "Remote end closed|Connection reset")):
            url = f"http://{address}:{port}/livez"
            done = subprocess.run([*enter, PYTHON, "-c", inside, url], capture_output=True, text=True, check=False)
            assert re.search(wanted, done.stderr) and bool(done.returncode) is bool(wanted), done.stderr
    assert ask(there, 8651) == 200


HOSTILE = (Path(__file__).resolve().parents[3] / "bench" / "hostile.py").read_text()
THOUSANDS = 10


def test_ten_thousand_hostile_things_change_nothing(pod: World, entry: list[str] | None) -> None:
    """PID 1 supervises and answers the kubelet under ten thousand mixed attacks from an unprivileged user.

    The attacks are messages, connections, descriptors and names. Memory, descriptors, processes, and the log by the
    second stay bounded.
    """
    run = str(pod.run)
    hostile = [*python(HOSTILE), f"{run}/log", f"{run}/notify.sock", f"{run}/control.sock", "127.0.0.1", "8650"]
    quick = {"delay": "10ms", "max-delay": "10ms", "window": "10ms"}
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify", "restart": quick},
            # The cable is there before anybody in the pod begins.
            "cable": {"command": ["/bin/sleep", "1000"], "ready": {"file": f"{run}/cable"}},
            "hostile": STRANGER | {"command": hostile, "needs": ["cable"]},
        },
        entry=entry,
        network=True,
        MINIVM_SYSLOG=f"{run}/log",
        MINIVM_HTTP="0.0.0.0:8650",
        MINIVM_PROBES="0.0.0.0:8651",
    )
    pod.until_state("a", "ready")
    there = cable(pod)
    pod.until(lambda: ask(there, 8651) == 200, "the node's question is answered")
    held, resident, began = pod.descriptors(), memory(pod), time.monotonic()
    (pod.run / "cable").touch()
    kills = 0
    while f"hostile | thrown {THOUSANDS}000\n" not in pod.output():
        before = pod.service("a").pid
        pod.ask("signal", service="a", signal="KILL")
        pod.until(lambda was=before: pod.service("a").pid not in (0, was) and pod.service("a").ready, "it runs again")  # type: ignore[misc]
        assert ask(there, 8651) == 200
        kills += 1
        assert time.monotonic() - began < 400, "the flood itself does not come on"
    size, seconds = len(pod.output()), time.monotonic() - began
    assert kills > 3
    assert size < (2 << 20) + seconds * (128 << 10), "the log"
    assert memory(pod) - resident < 16 << 10, "KiB, what the flood may hold of PID 1 at a time"
    pod.ask("stop", service="hostile")
    pod.until(
        lambda: pod.descriptors() <= held + 4, "every descriptor is given back, but the pipes of the service itself"
    )
    pod.until(lambda: len(pod_children(pod)) <= 3, "and every process ends")
    assert pod.service("a").ready and pod.service("hostile").starts == 1


def memory(pod: World) -> int:
    text = Path(f"/proc/{pod.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")))


def pod_children(pod: World) -> list[str]:
    return Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
