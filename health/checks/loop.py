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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from gitsync import lease
from gitsync.errors import GitsyncError
from ground.files import read_json, write_if_possible
from ground.sockets import notify
from health.api import When
from health.ask import ask_broker
from health.checks.active_checks import active_metrics, active_summary
from health.checks.load import CheckSelection, due
from health.places import Places, boot_id
from health.policy import share
from health.rounds import SUMMARY_LIMIT, DeepState, DeepSummary, read_deep, read_index, write_deep
from health.script import UNFIT, environment, run_here
from health.tell import metrics, sentence, tell
from health.verdict import drop_void, read_verdict, read_verdicts
from init.pod.pod import Pod

# Decide if this pod starts the deep checks by itself, and run them once per boot.
# The node's drain decides: the fleet waits for a rebooted machine, or an earlier pod found a problem that needs a
# reboot or the manufacturer. The drain precedes the pod and is checked again when the checks start, so no job runs and
# none comes.
# The broker asks the controller, which may take time.
BROKER_S = 15.0
CUT = "the deep checks were interrupted, and jobs may run by now"


def are_deep_checks_wanted() -> bool | None:
    """Ask the broker if deep checks are wanted; None while it has no answer from the controller."""
    if os.environ.get("MINIVM_HEALTH_DEEP") == "1":
        return True
    answer = (ask_broker({"ask": "deep"}, BROKER_S) or {}).get("deep")
    return answer if isinstance(answer, bool) else None


def run_deep_once(run: Callable[[], str], wanted: Callable[[], bool | None] = are_deep_checks_wanted) -> bool:
    """Run the deep checks if wanted; tell if they are settled for this boot.

    An interrupted run starts anew if it still may. `run` returns the reason why it could not run.
    """
    path, boot = Places.from_environment().deep, boot_id()
    deep_state = read_deep(path)
    if deep_state is not None and deep_state.is_settled(boot):
        return True
    if (answer := wanted()) is None:
        return False
    if not answer:
        cut = deep_state is not None and deep_state.boot_id == boot
        write_deep(
            path, DeepSummary(boot, DeepState.UNKNOWN, said=CUT) if cut else DeepSummary(boot, DeepState.NOT_ASKED)
        )
        return True
    write_deep(path, DeepSummary(boot, DeepState.RUNNING))
    failure = run()
    after = read_deep(path)
    if after is None or not after.is_settled(boot):
        write_deep(
            path, DeepSummary(boot, DeepState.UNKNOWN, said=(failure or "the round left no result")[:SUMMARY_LIMIT])
        )
    return True


# Each round finds the due checks itself; this is the finest interval.
ROUND_S = 15.0
# The deep set runs for minutes and has deadlines of its own.
DEEP_S = 900.0
BACKGROUND_S = 120.0


def round_once(when: str, limit_s: float, *, only_due: bool) -> str:
    """Run one round; return the reason if it could not run, else ""."""
    try:
        with lease.hold() as held:
            selection = CheckSelection(When(when), only_due=only_due)
            env = environment("health", os.environ, held.commit, str(held.path), UNFIT)
            done = run_here(partial(_perform, held.path, held.commit, selection), env, limit_s)
    except (GitsyncError, OSError) as error:
        return str(error)
    if done.broken:
        last = done.err.strip().splitlines()[-1:] or [""]
        return f"{done.broken} {last[0]}".strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if any(item["result"] == "problem" for item in json.loads(done.out)["ran"]):
            ask_broker({"ask": "look"}, 0.5)
    return ""


def _perform(tree: Path, commit: str, selection: CheckSelection) -> bytes:
    # Import in the child only: the parent sleeps between rounds and does not need it.
    from health.checks.round import perform

    return perform(tree, commit, selection).encode()


def is_round_due(now: float) -> bool:
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


UNKNOWN = "unknown"  # no sentence of `report`


def report(shown: str, now: float) -> str:
    """Update the pod's condition and metrics; return the sentence that the pod shows now."""
    places = Places.from_environment()
    verdicts = drop_void(read_verdicts(places.verdicts), places.scripts)
    write_if_possible(places.metrics, metrics(verdicts, now) + active_metrics())
    write_active(places.active)
    text = sentence(verdicts, now)
    return text if text == shown or tell(text) else shown


def write_active(file: Path) -> None:
    """Write the last results of active checks for the pod's page, if they changed: a reader watches the file."""
    summary = {name: list(result) for name, result in active_summary().items()}
    if summary != read_json(file):
        write_if_possible(file, json.dumps(summary))


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
    settled = run_deep_once(lambda: _run_logged("deep", DEEP_S))
    at = time.monotonic() + (0.0 if first else offset)
    fault, shown = "", UNKNOWN  # an earlier process may have died with a sentence on the pod
    while True:
        select.select([], [], [], max(0.0, at - time.monotonic()))
        settled = settled or run_deep_once(lambda: _run_logged("deep", DEEP_S))
        before = fault
        fault = round_once("background", BACKGROUND_S, only_due=True) if is_round_due(time.time()) else ""
        shown = report(shown, time.time())
        if fault != before:
            print(f"health: {fault or 'rounds of checks run again'}", file=sys.stderr, flush=True)
        # From now on, keep to this pod's offset in the interval.
        now = time.monotonic()
        at = now + span if not first else now + offset + 0.1
        first = False


if __name__ == "__main__":
    raise SystemExit(main())
