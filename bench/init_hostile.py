"""Measure how much longer a restart takes while a user without privileges attacks PID 1 (`bench.hostile`)."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import statistics
import time
from pathlib import Path

from bench.init_peers import PYTHON, Peer
from bench.init_pod import BenchPod

KILLS = 25
HOSTILE = Path(__file__).with_name("hostile.py").read_text()
_NULL = os.open("/dev/null", os.O_WRONLY)


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


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
