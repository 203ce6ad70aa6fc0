"""Run the background checks of the current commit, round after round, in a small process that sleeps in between.

python3 -I -m health.checks.loop

Each round is a short-lived fork: a check that leaks or hangs ends with it. The first round waits for a part of the
interval that the pod's name determines, so that a fleet that starts at once does not query its drivers in step for
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

# Each round finds the due checks itself; this is the finest interval.
ROUND_S = 15.0
# The deep set runs for minutes and has deadlines of its own.
DEEP_S = 900.0
BACKGROUND_S = 120.0


def round_once(when: str, limit_s: float, *, only_due: bool) -> str:
    """Run one round; return the reason if it could not run, else ""."""
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
    # Import in the child only: the parent sleeps between rounds and does not need it.
    from health.checks.round import perform

    return perform(tree, commit, asked).encode()


def anything_due(now: float) -> bool:
    """Tell if a round would run a check: reads a few small files, whereas a round forks and loads every check."""
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
    """Update the pod's condition and metrics; return the sentence that the pod shows now."""
    places = Places.from_environment()
    verdicts = read_verdicts(places.verdicts)
    write_metrics(places.metrics, metrics(verdicts, now))
    text = sentence(verdicts, now)
    return text if text == shown or tell(text) else shown


def _run_logged(when: str, limit_s: float) -> str:
    if failure := round_once(when, limit_s, only_due=False):
        print(f"health: {when}: {failure}", file=sys.stderr, flush=True)
    return failure


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    span = float(os.environ.get("MINIVM_HEALTH_ROUND_SECONDS", ROUND_S))
    offset = span * share(Pod(os.environ).name)
    notify("READY=1")
    first = not Places.from_environment().index.exists()
    # A pod's first round starts at once: it writes the index, without which every prolog runs its checks itself.
    if first:
        _run_logged("boot", BACKGROUND_S)
    settled = deep.once(lambda: _run_logged("deep", DEEP_S))
    at = time.monotonic() + (0.0 if first else offset)
    fault = shown = ""
    while True:
        select.select([], [], [], max(0.0, at - time.monotonic()))
        settled = settled or deep.once(lambda: _run_logged("deep", DEEP_S))
        before = fault
        fault = round_once("background", BACKGROUND_S, only_due=True) if anything_due(time.time()) else ""
        shown = report(shown, time.time())
        if fault != before:
            print(f"health: {fault or 'rounds of checks run again'}", file=sys.stderr, flush=True)
        # From now on, keep to this pod's offset in the interval.
        now = time.monotonic()
        at = now + span if not first else now + offset + 0.1
        first = False


if __name__ == "__main__":
    raise SystemExit(main())
