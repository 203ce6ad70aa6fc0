"""Measure one part of a node: `python3 -I -m health.active.measure cpu|memory|disk|tcp`. Prints "NAME VALUE MB/s".

The programs load their part for a few seconds and judge nothing. They need the standard library only.

`tcp` measures both directions between this node and each node in $MINIVM_PEERS, whose part srun starts as the step
`tcp-peer ADDRESS PORT` of the same job. The peers connect to this node and prove themselves by a token.
"""

from __future__ import annotations

import hashlib
import hmac
import multiprocessing
import os
import queue
import random
import secrets
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

SECONDS = 2.0
MIB = 1 << 20
BLOCK = 64 * MIB
DISK = 128 * MIB
CHUNK = MIB // 4
# SrunPortRange, which network policies leave open between workers.
PORTS = range(60001, 63001)
PATIENCE_S = 30.0
STRANGER_S, LONGEST_HELLO, MOST_WAITING = 3.0, 300, 256
# For what a slow link has not delivered yet; what has come by then is its rate.
LATE_S = 6.0
# Exit code of a peer without a connection, and the time in which it tries to connect.
NO_WAY, CONNECT_S = 75, 8.0
TOKEN = "MINIVM_ACTIVE_TOKEN"  # the variable's name


def repeat(action: Callable[[], object], size: int) -> float:
    """Return the MB/s at which the action handles `size` bytes: the median of its runs, which one hiccup leaves."""
    rates: list[float] = []
    until = time.monotonic() + SECONDS
    while not rates or time.monotonic() < until or (len(rates) < 3 and time.monotonic() < until + 4 * SECONDS):
        start = time.monotonic()
        action()
        rates.append(size / 1e6 / max(time.monotonic() - start, 1e-9))
    return statistics.median(rates)


def hash_on(cpu: int) -> tuple[int, float]:
    os.sched_setaffinity(0, {cpu})
    block = bytes(MIB)
    return cpu, repeat(lambda: hashlib.blake2b(block).digest(), MIB)


def cpu() -> Iterator[tuple[str, float]]:
    """Hash on every CPU of the node at once."""
    cpus = sorted(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(len(cpus), maxtasksperchild=1) as pool:
        for number, rate in pool.imap(hash_on, cpus, chunksize=1):
            yield f"cpu{number}", rate


def memory() -> Iterator[tuple[str, float]]:
    """Copy a block that no cache holds."""
    source, target = bytearray(BLOCK), bytearray(BLOCK)
    view = memoryview(source)

    def copy() -> None:
        target[:] = view

    copy()
    yield "copy", repeat(copy, BLOCK)


def disk() -> Iterator[tuple[str, float]]:
    """Write a file through to the disk below the directory for temporary files."""
    block = os.urandom(MIB)
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            file.seek(0)
            for _ in range(DISK // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

        yield "write", repeat(write, DISK)


def listen() -> socket.socket:
    """Listen on a free port of the range."""
    dual = socket.has_dualstack_ipv6()
    for port in random.sample(PORTS, 100):
        with suppress(OSError):
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)
    raise OSError("no free port between 60001 and 63000")


def send_for(connection: socket.socket, seconds: float) -> None:
    """Send for some seconds; a link that takes nothing more for LATE_S is left."""
    block = bytes(CHUNK)
    until = time.monotonic() + seconds
    connection.settimeout(LATE_S)
    with suppress(OSError):
        while time.monotonic() < until:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)


def receive_all(connection: socket.socket) -> float:
    """Read until the sender is done or its time is up; return MB/s."""
    buffer, size, start = bytearray(CHUNK), 0, time.monotonic()
    until = start + SECONDS + LATE_S
    with suppress(OSError):
        while (remaining := until - time.monotonic()) > 0:
            connection.settimeout(remaining)
            if not (count := connection.recv_into(buffer)):
                break
            size += count
    return size / 1e6 / max(time.monotonic() - start, 1e-9)


def read_line(connection: socket.socket) -> str:
    """Read one short line and nothing behind it."""
    text = b""
    while not text.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(text) > 300:
            raise OSError("the peer sent no complete line")
        text += byte
    return text.decode(errors="replace").strip()


def tcp() -> Iterator[tuple[str, float]]:
    peers = [name for name in os.environ.get("MINIVM_PEERS", "").split(",") if name]
    if not peers:
        raise OSError("MINIVM_PEERS names no node")
    token = secrets.token_hex(16)
    with listen() as server:
        # srun gives every task the address of the node where it runs itself: this one.
        command = [
            "srun", "--overlap", "--mpi=none", f"--nodes={len(peers)}",
            f"--ntasks={len(peers)}", "--ntasks-per-node=1", f"--nodelist={','.join(peers)}", f"--export=ALL,{TOKEN}",
            sys.executable, "-I", "-m", "health.active.measure", "tcp-peer", str(server.getsockname()[1]),
        ]  # fmt: skip
        with subprocess.Popen(command, env={**os.environ, TOKEN: token}, stdout=subprocess.DEVNULL) as step:
            # Two connections for each peer, one for each direction; they are measured one after the other.
            missing = {f"{direction}_{name}" for name in peers for direction in ("from", "to")}
            acceptor = PeerAcceptor(server, token)
            try:
                while missing:
                    connection, direction, name = wait_for_peer(acceptor, step)
                    with connection:
                        rate = measure(connection, direction)
                    missing.discard(f"{direction}_{name}")
                    yield f"{direction}_{name}", rate
            except TimeoutError:
                # The step runs, and its peers find no way here: that is a rate, and a step that did not start is none.
                # A crowd of strangers may have kept the peers out: then nothing is known.
                if step.wait(5.0) != NO_WAY:
                    raise
                if acceptor.turned_away:
                    raise OSError(
                        f"{acceptor.turned_away} foreign connections, last from {acceptor.stranger}"
                    ) from None
                yield from ((part, 0.0) for part in sorted(missing))
            finally:
                acceptor.close()
                # srun ends its step's tasks when it gets TERM.
                with suppress(subprocess.TimeoutExpired):
                    step.wait(5.0)
                step.terminate()


class PeerAcceptor(threading.Thread):
    """Accepts connections at once and lets in those that send the token: any program of the network may connect.

    Programs that send nothing cost a peer nothing. Only where more than MOST_WAITING of them are open, the oldest is
    closed unheard, and `turned_away` counts it.
    """

    def __init__(self, server: socket.socket, token: str) -> None:
        super().__init__(daemon=True)
        self.server, self.token = server, token
        self.peers: queue.SimpleQueue[tuple[socket.socket, str, str]] = queue.SimpleQueue()
        self.turned_away, self.stranger = 0, ""
        self._waiting: dict[socket.socket, tuple[float, bytearray]] = {}
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self.start()

    def close(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self.server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            late = time.monotonic() - STRANGER_S
            for connection in [each for each, (since, _) in self._waiting.items() if since < late]:
                self._forget(connection)
        for connection in [*self._waiting]:
            self._forget(connection)
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, address = self.server.accept()
            connection.setblocking(False)
            self.stranger = str(address[0])
            if len(self._waiting) >= MOST_WAITING:
                self.turned_away += 1
                self._forget(next(iter(self._waiting)))
            self._waiting[connection] = (time.monotonic(), bytearray())
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._waiting:  # closed in this round
            return
        text, more = self._waiting[connection][1], b""
        with suppress(OSError):
            more = connection.recv(LONGEST_HELLO)
        text += more
        if more and not text.endswith(b"\n") and len(text) < LONGEST_HELLO:
            return
        words = text.decode(errors="replace").split()
        is_peer = len(words) == 3 and hmac.compare_digest(words[0].encode(), self.token.encode())
        self._forget(connection, keep=is_peer)
        if is_peer:
            self.peers.put((connection, words[1], words[2]))

    def _forget(self, connection: socket.socket, *, keep: bool = False) -> None:
        del self._waiting[connection]
        self._selector.unregister(connection)
        if not keep:
            connection.close()


def wait_for_peer(acceptor: PeerAcceptor, step: subprocess.Popen[bytes]) -> tuple[socket.socket, str, str]:
    """Return the next peer's connection, direction and name; TimeoutError if none comes or the step has ended."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        has_ended = step.poll() is not None
        with suppress(queue.Empty):
            return acceptor.peers.get(timeout=1.0)
        if has_ended:
            break
    raise TimeoutError("no peer has come")


def measure(connection: socket.socket, direction: str) -> float:
    """Return the rate to or from a peer; 0 if the connection breaks."""
    try:
        connection.settimeout(LATE_S)
        connection.sendall(b"go\n")
        if direction == "from":
            return receive_all(connection)
        send_for(connection, SECONDS)
        # The peer reports at the latest then.
        connection.settimeout(2 * LATE_S)
        return float(read_line(connection))
    except (OSError, ValueError):
        return 0.0


def tcp_peer(port: int) -> None:
    """Send to the measuring node, then receive from it."""
    token, name = os.environ[TOKEN], os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    address = (os.environ["SLURM_LAUNCH_NODE_IPADDR"], port)
    is_broken = False
    for direction in ("from", "to"):
        try:
            with socket.create_connection(address, CONNECT_S) as connection:
                exchange(connection, direction, f"{token} {direction} {name}\n")
        except OSError as error:
            print(f"{name} has no connection to {address[0]}: {error}", file=sys.stderr)
            is_broken = True
    if is_broken:
        sys.exit(NO_WAY)


def exchange(connection: socket.socket, direction: str, hello: str) -> None:
    connection.sendall(hello.encode())
    # The measuring node serves one connection after the other.
    connection.settimeout(PATIENCE_S * 4)
    read_line(connection)
    if direction == "from":
        send_for(connection, SECONDS)
        connection.recv(1)
    else:
        connection.sendall(f"{receive_all(connection):.1f}\n".encode())


PROGRAMS: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {
    "cpu": cpu,
    "memory": memory,
    "disk": disk,
    "tcp": tcp,
}


def main(arguments: list[str]) -> int:
    # A job that makes room ends at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    match arguments:
        case ["tcp-peer", port]:
            tcp_peer(int(port))
        case [name] if name in PROGRAMS:
            for part, rate in PROGRAMS[name]():
                print(f"{part} {rate:.1f} MB/s", flush=True)
        case _:
            print(f"wanted one of {', '.join(PROGRAMS)}, not {' '.join(arguments)!r}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
