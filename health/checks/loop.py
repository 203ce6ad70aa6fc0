"""Runs the background checks of the current commit, round after round: a small process that sleeps between them.

    python3 -I -m health.checks.loop

Each round is a short child of its own: a check that leaks or hangs ends with it. The first round waits a part of the
interval that the pod's name gives, so that a fleet that starts at once does not ask its drivers at once for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from gitsync import lease
from gitsync.errors import GitsyncError
from health.api import When
from health.ask import ask_broker
from health.places import Places, due
from health.script import UNFIT, environment, run
from health.tell import metrics, sentence, tell, write_metrics
from health.verdict import VERDICTS, boot_id, read_verdict, read_verdicts

# A round finds out by itself which checks are due; this is the finest grain.
ROUND_S = 15.0
# The deep set runs minutes and has deadlines of its own.
DEEP_S = 900.0
BACKGROUND_S = 120.0


def round_once(when: str, limit_s: float, *, only_due: bool) -> str:
    """Why the round could not be run, or ""."""
    try:
        with lease.hold() as held:
            argv = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(held.path)]
            argv += ["--commit", held.commit, "--when", when, *(["--due"] if only_due else [])]
            env = environment("health", os.environ, held.commit, str(held.path), UNFIT)
            done = run(argv, env, limit_s, UNFIT)
    except (GitsyncError, OSError) as error:
        return str(error)
    if done.broken:
        last = done.err.strip().splitlines()[-1:] or [""]
        return f"{done.broken} {last[0]}".strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if any(item["result"] == "problem" for item in json.loads(done.out)["ran"]):
            ask_broker({"ask": "look"}, 0.5)
    return ""


def anything_due(now: float) -> bool:
    """Whether a round would run a check: a few small files to read, where the round is an interpreter to start."""
    places = Places.from_environment()
    boot = boot_id()
    try:
        index = json.loads(places.index.read_bytes())
        with lease.hold() as held:
            if index["commit"] != held.commit or index["boot_id"] != boot:
                return True
        for name, facts in index["checks"].items():
            if When.BACKGROUND in facts["when"] and facts["applies"]:
                known = read_verdict(places.verdicts / f"{name}.json")
                if due(float(facts["period_s"]), known, now, boot):
                    return True
    except (OSError, ValueError, KeyError, TypeError, GitsyncError):
        return True
    return False


def report(told: str) -> str:
    """The pod's own words about its health, told when they change; what it was told last."""
    now = time.time()
    verdicts = read_verdicts(Path(os.environ.get("MINIVM_VERDICTS", VERDICTS)))
    write_metrics(metrics(verdicts, now))
    text = sentence(verdicts, now)
    return text if text == told or tell(text) else told


def delay(name: str, span_s: float) -> float:
    """This pod's part of the span: the same at each start, and spread over the fleet."""
    return span_s * int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _notify(text: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client, contextlib.suppress(OSError):
            client.sendto(text, "\0" + address[1:] if address.startswith("@") else address)


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    name = os.environ.get("MINIVM_POD_NAME") or os.uname().nodename
    span = float(os.environ.get("MINIVM_HEALTH_ROUND_SECONDS", ROUND_S))
    _notify(b"READY=1")
    first = not Places.from_environment().index.exists()
    # The first round of a pod is not late: it makes the index without which every prolog runs its checks itself.
    for when in ["boot", *(["deep"] if os.environ.get("MINIVM_HEALTH_DEEP") == "1" else [])] if first else []:
        fault = round_once(when, DEEP_S if when == "deep" else BACKGROUND_S, only_due=False)
        if fault:
            print(f"health: {when}: {fault}", file=sys.stderr, flush=True)
    due = time.monotonic() + (0.0 if first else delay(name, span))
    said = told = ""
    while True:
        select.select([], [], [], max(0.0, due - time.monotonic()))
        fault = round_once("background", BACKGROUND_S, only_due=True) if anything_due(time.time()) else ""
        told = report(told)
        if fault != said:
            print(f"health: {fault or 'rounds run again'}", file=sys.stderr, flush=True)
            said = fault
        # From here on at this pod's own moment of the interval.
        now = time.monotonic()
        due = now + span if not first else now + delay(name, span) + 0.1
        first = False


if __name__ == "__main__":
    raise SystemExit(main())
