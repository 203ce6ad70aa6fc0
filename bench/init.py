"""Measure init against supervisord, s6, tini, dumb-init and a bare Python loop, each figure in one run.

`python -m bench init`. Needs root: every supervisor is PID 1 of its own namespace. A peer that is not installed, or
cannot do what is measured, shows as "-". Figures are medians; peers take turns, so that the machine's load affects
all alike.

To compare two versions: `BENCH_BEFORE=CHECKOUT python -m bench init`, with another checkout of this repository; and
`BENCH_ROUNDS=5`, five times as many turns of each, for a small difference.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.init_pod import PEERS, PYTHON, BenchPod, Peer, after, machine

# Measure how much longer a restart takes while a user without privileges attacks PID 1 (`bench.hostile`).
KILLS = 25
HOSTILE = Path(__file__).with_name("hostile.py").read_text()


def under_attack(peer: Peer) -> float | None:
    """Return the ratio of restart times, median during the attack to median before it."""
    if peer.name != "init":
        return None  # the others have no such doors
    with BenchPod() as pod:
        pod.directory.chmod(0o755)
        run, gate = pod.directory / "run", pod.directory / "gate"
        os.mkfifo(gate)
        opened = os.open(gate, os.O_RDWR)
        services = {
            f"s{number}": ["/bin/sh", "-c", f"echo up > {pod.mark}; exec sleep 1000"] for number in range(2 * KILLS)
        }
        port, log = free_port(), run / "log"
        aims = [str(log), str(run / "notify.sock"), str(run / "control.sock"), "127.0.0.1", str(port)]
        program = " ".join(map(shlex.quote, [PYTHON, "-I", "-S", "-c", HOSTILE, *aims]))
        services["hostile"] = ["/bin/sh", "-c", f"read go < {gate}; echo up > {pod.mark}; exec {program}"]
        argv = peer.argv(pod.directory, services)
        assert argv is not None
        pod.start(argv, _NULL, {"MINIVM_SYSLOG": str(log), "MINIVM_HTTP": f"127.0.0.1:{port}"})
        pod.marks(2 * KILLS)
        time.sleep(1.3)
        victims = [pid for pid in pod.inside() if comm(pid) == "sleep"]
        quiet = [again(pod, pid) for pid in victims[:KILLS]]
        os.write(opened, b"go\n")
        pod.marks(1)
        time.sleep(1)  # it is in full flow, and has used up what users may log at once
        attacked = [again(pod, pid) for pid in victims[KILLS:]]
        os.close(opened)
        return statistics.median(attacked) / statistics.median(quiet)


def again(pod: BenchPod, pid: int) -> float:
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return pod.marks(1)[0] - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


ROUNDS = 7
TIMES = int(os.environ.get("BENCH_ROUNDS", "1"))
ORPHANS = 2000
LOG_BYTES = 300_000_000
IDLE_SECONDS = 10.0
Figure = Callable[[Peer], "float | None"]


def five(pod: BenchPod) -> dict[str, list[str]]:
    return {f"s{number}": ["/bin/sh", "-c", f"echo up > {pod.mark}; exec sleep 1000"] for number in range(5)}


def started(peer: Peer) -> float | None:
    """Measure from the exec of PID 1 until the fifth service reports that it runs."""
    with BenchPod() as pod:
        argv = peer.argv(pod.directory, five(pod))
        if argv is None:
            return None
        pod.start(argv, devnull())
        return (pod.marks(5)[-1] - pod.began) * 1000


def chain(peer: Peer) -> float | None:
    """Measure a chain of five services that are ready 50 ms after their start: 250 ms are the floor."""
    with BenchPod() as pod:
        services = {}
        for number in range(5):
            name = f"s{number}"
            ready = "echo >&3" if peer.name == "s6" else f": > {after(name, pod.directory)}"
            services[name] = ["/bin/sh", "-c", f"sleep 0.05; {ready}; echo up > {pod.mark}; exec sleep 1000"]
        if peer.name == "nobody":  # no supervisor at all: one shell, one after the other
            script = "".join(f"sleep 0.05; (echo up > {pod.mark}; exec sleep 1000) & " for _ in services)
            argv: list[str] | None = ["/bin/sh", "-c", f"{script} exec sleep 1000"]
        else:
            argv = peer.argv(pod.directory, services, chain=True)
        if argv is None:
            return None
        pod.start(argv, devnull())
        return (pod.marks(5)[-1] - pod.began) * 1000


def restart(peer: Peer) -> float | None:
    """Measure from the kill of a long-running service until its successor reports that it runs."""
    with BenchPod() as pod:
        argv = peer.argv(pod.directory, {**five(pod)})
        if argv is None:
            return None
        pod.start(argv, devnull())
        pod.marks(5)
        time.sleep(1.3)  # supervisord and s6 call anything shorter a failed start
        victim = next(pid for pid in descendants(pod.pid) if comm(pid) == "sleep")
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return (pod.marks(1)[0] - began) * 1000


def orphans(peer: Peer) -> float | None:
    """Measure until the last of 2,000 orphans that end at once is reaped."""
    gate = "g = os.open(sys.argv[1], os.O_RDONLY)"
    code = (
        f"import os, sys\n{gate}\nfor n in range({ORPHANS}):\n"
        "    if os.fork() == 0:\n        os.read(g, 1); os._exit(0)\n"
        "open(sys.argv[2], 'w').write('up ')\n"
        "if os.fork() == 0:\n    os.execv('/bin/sleep', ['sleep', '1000'])\nos._exit(0)"
    )
    with BenchPod() as pod:
        hold = pod.directory / "gate"
        os.mkfifo(hold)
        gatekeeper = os.open(hold, os.O_RDWR)
        breed = [PYTHON, "-I", "-S", "-c", code, str(hold), str(pod.mark)]
        # The breeder ends and leaves its children to PID 1; a service beside it keeps the reapers' one child alive.
        both = ["/bin/sh", "-c", f"{' '.join(quoted(part) for part in breed)} & exec sleep 1000"]
        argv = KERNEL if peer.name == "nobody" else peer.argv(pod.directory, {"s0": both})
        if argv is None:
            return None
        pod.start([*argv, *both] if peer.name == "nobody" else argv, devnull())
        pod.marks(1)
        until(lambda: len(pod.inside()) >= ORPHANS)
        os.write(gatekeeper, b"x" * ORPHANS)  # a byte for each: the word to end
        began = time.monotonic()
        until(lambda: len(pod.inside()) < 10)
        elapsed_ms = (time.monotonic() - began) * 1000
        os.close(gatekeeper)
        return elapsed_ms


KERNEL = [
    PYTHON, "-I", "-S", "-c",
    "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "os.fork() or os.execv(sys.argv[1], sys.argv[1:])\nwhile True: signal.pause()",
]  # fmt: skip


def stop(peer: Peer) -> float | None:
    """Measure from TERM to PID 1's end, less the slowest service's own time. None if a service got no TERM."""
    with BenchPod() as pod:
        body = f"trap 'echo bye > {pod.mark}; exit 0' TERM; echo up > {pod.mark}; while :; do sleep 1000 & wait; done"
        argv = peer.argv(pod.directory, {f"s{number}": ["/bin/sh", "-c", body] for number in range(5)})
        if argv is None:
            return None
        pod.start(argv, devnull())
        pod.marks(5)
        pod.signal(signal.SIGTERM)
        last = pod.marks(5, patience=15)[-1]
        return max(0.0, (pod.ended() - last) * 1000)


def memory(peer: Peer) -> float | None:
    return steady(peer, lambda pod: pod.status("VmRSS") / 1024)


def proportional(peer: Peer) -> float | None:
    return steady(peer, lambda pod: pod.pss() / 1024)


def idle(peer: Peer) -> float | None:
    def count(pod: BenchPod) -> float:
        before = pod.status("voluntary_ctxt_switches")
        time.sleep(IDLE_SECONDS)
        return pod.status("voluntary_ctxt_switches") - before

    return steady(peer, count)


def steady(peer: Peer, look: Callable[[BenchPod], float]) -> float | None:
    with BenchPod() as pod:
        argv = peer.argv(pod.directory, five(pod))
        if argv is None:
            return None
        pod.start(argv, devnull())
        pod.marks(5)
        time.sleep(2)  # boot is over for every one of them
        return look(pod)


def logs(peer: Peer) -> float | None:
    """Measure MB/s of tagged lines into a file in memory; a lost line voids the figure."""
    if peer.name not in ("init", "init before", "bare Python loop"):
        return None  # the others do not tag what they pass on
    line = "x" * 99 + "\n"
    count = LOG_BYTES // len(line)
    block = 10_000
    code = f"import os\nb = b'x' * 99 + b'\\n'\nb *= {block}\nfor _ in range({count // block}):\n"
    code += "    v = memoryview(b)\n    while v: v = v[os.write(1, v):]\n"
    with BenchPod() as pod:
        target = Path("/dev/shm") / f"{pod.directory.name}.log"
        try:
            output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            quiet = f"{quoted(PYTHON)} -I -S -c {quoted(code)}; echo up > {pod.mark}; exec sleep 1000"
            argv = peer.argv(pod.directory, {"s0": ["/bin/sh", "-c", quiet]})
            assert argv is not None
            pod.start(argv, output)
            done = pod.marks(1)[0]
            expected = count // block * block
            until(lambda: target.stat().st_size >= expected * (len(line) + len("s0 | ")))
            seconds = max(done, time.monotonic()) - pod.began
            tagged = ("s0 | " + line).encode()
            data = target.read_bytes()
            if data.count(tagged) != expected or len(data) != expected * len(tagged):
                raise AssertionError(f"{peer.name}: {data.count(tagged)} of {expected} lines")
            return expected * len(line) / 1e6 / seconds
        finally:
            os.close(output)
            target.unlink()


# What it takes.


def devnull() -> int:
    return _NULL


_NULL = os.open("/dev/null", os.O_WRONLY)


def quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    pids = []
    todo = [pid]
    while todo:
        current = todo.pop()
        children = Path(f"/proc/{current}/task/{current}/children")
        try:
            below = [int(word) for word in children.read_text().split()]
        except OSError:
            continue
        pids += below
        todo += below
    return pids


def until(look: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come")
        time.sleep(0.001)


FIGURES: Mapping[str, tuple[str, Figure, int, str]] = {
    "started": ("5 services started, ms", started, ROUNDS, "<= 28 and <= 1.5 x the bare loop"),
    "chain": ("chain of 5, each ready after 50 ms, ms", chain, 5, "<= 280 (floor 250)"),
    "restart": ("kill to running again, ms", restart, ROUNDS, "<= 3"),
    "hostile": ("the same while a user attacks, times the quiet value", under_attack, 3, "<= 3"),
    "orphans": (f"{ORPHANS} orphans reaped, ms", orphans, 3, "<= 1.2 x nobody (the kernel alone)"),
    "stop": ("TERM to exit beyond the slowest service, ms", stop, 5, "<= 10"),
    "rss": ("RSS, MB", memory, 3, "<= 15"),
    "pss": ("PSS, MB", proportional, 3, ""),
    "idle": (f"wake-ups in {IDLE_SECONDS:.0f} idle seconds", idle, 1, "0"),
    "logs": ("tagged logs, MB/s", logs, 3, ">= 200"),
}


class Kernel(Peer):
    """The machine's own floor: a PID 1 that ignores SIGCHLD (the kernel reaps), a shell that runs a chain."""


def measure(name: str, peers: list[Peer]) -> dict[str, float | None]:
    _, figure, rounds, _ = FIGURES[name]
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(rounds * TIMES):
        for peer in peers:
            if not peer.available():
                continue
            try:
                value = figure(peer)
            except TimeoutError:
                value = None  # a service that was never told, a start that never came
            if value is not None:
                samples[peer.name].append(value)
    return {peer: statistics.median(values) if values else None for peer, values in samples.items()}


def main(chosen: list[str] | None = None) -> int:
    if os.geteuid() != 0:
        print("bench init needs root: every supervisor is PID 1 of its own namespace", file=sys.stderr)
        return 1
    print(f"{machine()}\n")
    missing = [peer.name for peer in PEERS if not peer.available()]
    if missing:
        print(f"not installed: {', '.join(missing)}\n")
    names = [peer.name for peer in PEERS] + ["nobody"]
    print(f"| figure | {' | '.join(names)} | aim |\n|{'---|' * (len(names) + 2)}", flush=True)
    for name in chosen or list(FIGURES):
        peers = [*PEERS, Kernel("nobody")] if name in ("orphans", "chain") else list(PEERS)
        figures = measure(name, peers)
        shown = ["-" if (value := figures.get(peer)) is None else f"{value:.1f}" for peer in names]
        print(f"| {FIGURES[name][0]} | {' | '.join(shown)} | {FIGURES[name][3]} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
