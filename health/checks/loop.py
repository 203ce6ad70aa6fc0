"""Runs the background checks of the current commit, round after round: a small process that sleeps between them.

    python3 -I -m health.checks.loop

Each round is a short child of its own, a fork: a check that leaks or hangs ends with it. The first round waits a part
of the interval that the pod's name gives, so that a fleet that starts at once does not ask its drivers at once for
ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from gitsync import lease
from gitsync.errors import GitsyncError
from ground.sockets import notify
from health.api import When
from health.ask import ask_broker
from health.checks import deep
from health.checks.select import Asked, due
from health.index import read_index
from health.places import Places, boot_id
from health.script import UNFIT, environment, run_here
from health.spread import share
from health.tell import metrics, sentence, tell, write_metrics
from health.verdict import read_verdict, read_verdicts
from init.pod.pod import Pod

# A round finds out by itself which checks are due; this is the finest grain.
ROUND_S = 15.0
# The deep set runs minutes and has deadlines of its own.
DEEP_S = 900.0
BACKGROUND_S = 120.0


def round_once(when: str, limit_s: float, *, only_due: bool) -> str:
    """Why the round could not be run, or ""."""
    try:
        with lease.hold() as held:
            asked = Asked(When(when), only_due=only_due)
            env = environment("health", os.environ, held.commit, str(held.path), UNFIT)
            done = run_here(partial(_perform, held.path, held.commit, asked), env, limit_s)
    except (GitsyncError, OSError) as error:
        return str(error)
    if done.broken:
        last = done.err.strip().splitlines()[-1:] or [""]
        return f"{done.broken} {last[0]}".strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if any(item["result"] == "problem" for item in json.loads(done.out)["ran"]):
            ask_broker({"ask": "look"}, 0.5)
    return ""


def _perform(tree: Path, commit: str, asked: Asked) -> bytes:
    # In the child alone: what sleeps between rounds has no need of it.
    from health.checks.round import perform

    return perform(tree, commit, asked).encode()


def anything_due(now: float) -> bool:
    """Whether a round would run a check: a few small files to read, where the round is a fork and loads each check."""
    places = Places.from_environment()
    boot = boot_id()
    index = read_index(places.index)
    try:
        with lease.hold() as held:
            if index is None or (index.commit, index.boot_id) != (held.commit, boot):
                return True
    except (OSError, GitsyncError):
        return True
    return any(
        due(listed.period_s, read_verdict(places.verdict(name)), now, boot)
        for name, listed in index.listed.items()
        if When.BACKGROUND in listed.when and listed.applies
    )


def report(shown: str, now: float) -> str:
    """The pod's own words about its health, said when they change; what it shows now."""
    places = Places.from_environment()
    verdicts = read_verdicts(places.verdicts)
    write_metrics(places.metrics, metrics(verdicts, now))
    text = sentence(verdicts, now)
    return text if text == shown or tell(text) else shown


def _told(when: str, limit_s: float) -> str:
    if why := round_once(when, limit_s, only_due=False):
        print(f"health: {when}: {why}", file=sys.stderr, flush=True)
    return why


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    span = float(os.environ.get("MINIVM_HEALTH_ROUND_SECONDS", ROUND_S))
    mine = span * share(Pod(os.environ).name)
    notify("READY=1")
    first = not Places.from_environment().index.exists()
    # The first round of a pod is not late: it makes the index without which every prolog runs its checks itself.
    if first:
        _told("boot", BACKGROUND_S)
    settled = deep.once(lambda: _told("deep", DEEP_S))
    at = time.monotonic() + (0.0 if first else mine)
    fault = shown = ""
    while True:
        select.select([], [], [], max(0.0, at - time.monotonic()))
        settled = settled or deep.once(lambda: _told("deep", DEEP_S))
        before = fault
        fault = round_once("background", BACKGROUND_S, only_due=True) if anything_due(time.time()) else ""
        shown = report(shown, time.time())
        if fault != before:
            print(f"health: {fault or 'rounds run again'}", file=sys.stderr, flush=True)
        # From here on at this pod's own moment of the interval.
        now = time.monotonic()
        at = now + span if not first else now + mine + 0.1
        first = False


if __name__ == "__main__":
    raise SystemExit(main())
