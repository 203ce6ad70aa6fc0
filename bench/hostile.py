"""A hostile user without privileges: messages, connections, descriptors and names, mixed, for ever.

A separate program: `python3 -c "$(cat bench/hostile.py)" LOG NOTIFY CONTROL HOST PORT`. It prints "thrown N" after
each thousand, and runs until a signal ends it. tests/process and `bench init` run it against a PID 1.
"""

import contextlib
import os
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable

EACH = 1000
HELD = 300  # connections at a time
NAMES = (
    b"NVRM: Xid (PCI:0",
    b"sshd: root@pts",
    b"slurmstepd: [1",
    b"\x1b[2J\rinit | ok",
    b")) Z 1 1 1 1",
    b"\xff\xfe\n\n",
)
LINES = (
    b"<86>Jan  1 00:00:00 sshd[1]: Accepted publickey for root",
    b"<0>kernel: mce: [Hardware Error]: Machine check\ninit | a: ready",
    b"\x1b[2J\x1b]0;owned\x07\r\n\0\0",
    b"",
    b"<13>" + b"x" * 60_000,
    bytes(range(256)) * 16,
)
TOLD = (b"READY=1\nMAINPID=1", b"MAINPID=\xc2\xb2", b"STATUS=" + b"\x9b" * 3000, b"WATCHDOG=1", b"=\n=\0")
ASKED = (
    b"",
    b"GET /livez HT",
    b"GET " + b"A" * 9000,
    b"\x16\x03\x01\0\0",
    b"POST / HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n",
)


def main(log: str, notify: str, control: str, host: str, port: str) -> None:
    become_nobody()
    dice = random.Random(os.getpid())
    sockets: deque[socket.socket] = deque()
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.settimeout(0.05)
    lasting = lingering()
    acts: tuple[Callable[[], object], ...] = (
        lambda: sender.sendto(dice.choice(LINES), log),
        lambda: sender.sendto(dice.choice(TOLD), notify),
        lambda: attach(sender, log, lasting.fileno() if dice.random() < 0.2 else 0, dice),
        lambda: attach(sender, notify, 0, dice),
        lambda: connect(host, int(port), sockets, dice),
        lambda: speak(control),
        lambda: breed(dice) if dice.random() < 0.05 else None,
    )
    thrown = 0
    while True:
        with contextlib.suppress(OSError):
            dice.choice(acts)()
        thrown += 1
        if thrown % EACH == 0:
            os.write(1, b"thrown %d\n" % thrown)


def become_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def lingering() -> socket.socket:
    """Return a connection with unsent data whose close takes an hour; its other end stays open."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    OTHERS.append(other)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(b"x" * 65536)
    return client


OTHERS: list[socket.socket] = []


def attach(sender: socket.socket, path: str, fd: int, dice: random.Random) -> None:
    fds = [fd] * dice.choice((1, 3, 100))
    sender.sendmsg(
        [b"<13>attached"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))], 0, path
    )


def connect(host: str, port: int, held: deque[socket.socket], dice: random.Random) -> None:
    if len(held) >= HELD:
        held.popleft().close()
    caller = socket.socket()
    caller.setblocking(False)
    held.append(caller)
    caller.connect_ex((host, port))
    older = dice.choice(held)
    older.send(dice.choice(ASKED))


def speak(control: str) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(control)
        caller.sendall(b'{"op": "shutdown"}\n')


def breed(dice: random.Random) -> None:
    """Make an orphan with a name, which PID 1 must reap."""
    pid = os.fork()
    if not pid:
        if os.fork():
            os._exit(0)
        with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as stream:  # noqa: PTH123 - nothing imported
            stream.write(dice.choice(NAMES)[:15])
        os._exit(7)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
