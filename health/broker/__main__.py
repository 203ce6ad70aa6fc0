"""Broker service: talks to Slurm about this node's health; sleeps until verdicts change.

python3 -I -m health.broker

A prolog asks it over its socket if the node is drained for a problem just found.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from types import FrameType

from ground.sockets import notify, read_line
from health.broker.broker import Broker, Slurm
from health.places import Places
from health.tell import tell
from init.pod.pod import Pod
from init.slurm.client import address


def _serve(listener: socket.socket, broker: Broker) -> None:
    client, _ = listener.accept()
    with client:
        try:
            request = json.loads(read_line(client, 1.0, 65536))
            answer = broker.answer(request) if isinstance(request, dict) else {"error": "wanted a mapping"}
            client.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError, RecursionError):
            # The client has gone, or its request is invalid.
            return


def _report(broker: Broker, reported: dict[str, str]) -> None:
    """Report an ignored policy file, and a drain by Slurm itself that stays, as conditions of the pod."""
    policy = f"policy file ignored: {broker.refused}" if broker.refused else ""
    for name, text in (("policy", policy), ("slurm-drain", broker.memory.slurm_drain)):
        if reported.get(name) != text and tell(text, name):
            reported[name] = text


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    places = Places.from_environment()
    broker = Broker(places, Slurm(Pod(os.environ).name, address(os.environ)))
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, lambda number, frame: broker.reload_policy())
    places.verdicts.mkdir(parents=True, exist_ok=True)
    places.broker.parent.mkdir(parents=True, exist_ok=True)
    places.broker.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        listener.bind(str(places.broker))
        os.umask(mask)
        listener.listen(64)
        notify("READY=1")
        broker.reload_policy()
        # Report empty texts too: a previous broker may have died with a report outstanding.
        reported: dict[str, str] = {}
        _report(broker, reported)
        try:
            while True:
                if select.select([listener], [], [], broker.wait_s())[0]:
                    broker.reload_policy()
                    _serve(listener, broker)
                elif broker.detect_change():
                    broker.reload_policy()
                    broker.look()
                    _report(broker, reported)
                broker.end_dead_jobs()
        finally:
            places.broker.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
