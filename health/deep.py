"""What this boot's deep checks have said, as one word for whoever waits for it: the pod tells it on as a condition of
its own (init/helpers/deep.py), and the fleet takes a machine back by that after a reboot.

Also whether they are to run at all, and that they are running: who begins anew knows it from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from ground.errors import one_line
from ground.files import read_json, write_json
from health.verdict import Result, Verdict

SAID = 240


class State(StrEnum):
    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"  # they have run, or could not, and do not know
    RUNNING = "running"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Word:
    boot_id: str
    state: State
    ran: int = 0  # those of them that were about GPUs
    said: str = ""

    def settled(self, boot_id: str) -> bool:
        """Nothing is to be begun for this boot any more; whoever asks by name is answered all the same."""
        return bool(boot_id) and self.boot_id == boot_id and self.state is not State.RUNNING


def word(verdicts: Iterable[Verdict], broken: Iterable[str], boot_id: str, of_gpus: Collection[str]) -> Word:
    """Of a whole round. Unknown is never ok, and of a check that cannot be loaded nobody knows what it would say.
    `of_gpus`: the checks that are about these; where GPUs are gone they have not run."""
    ran = sorted((one for one in verdicts if one.applies), key=lambda one: (-one.class_.weight, one.check))
    gpus = sum(one.check in of_gpus for one in ran)
    problems = [one for one in ran if one.result is Result.PROBLEM]
    doubts = [f"{one.check}: {one.reason}" for one in ran if one.result is Result.UNKNOWN]
    doubts += [f"{name}: the check is broken" for name in sorted(broken)]
    if problems:
        text = "; ".join(f"{one.check}[{one.class_}]@{one.commit[:7] or 'none'} {one.reason}" for one in problems)
        return Word(boot_id, State.PROBLEM, gpus, _line(text))
    if doubts:
        return Word(boot_id, State.UNKNOWN, gpus, _line("; ".join(doubts)))
    return Word(boot_id, State.OK, gpus, _line(" ".join(one.check for one in ran)))


def write(path: Path, said: Word) -> None:
    with contextlib.suppress(OSError):
        # What lies beside its directory is root's alone, whoever makes it first.
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, asdict(said))


def read(path: Path) -> Word | None:
    """None where there is none, or where it cannot be read: then nothing is known."""
    data = read_json(path)
    try:
        return Word(str(data["boot_id"]), State(str(data["state"])), int(data["ran"]), str(data["said"]))
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def runs(path: Path, boot_id: str) -> bool:
    known = read(path)
    return known is not None and known.state is State.RUNNING and known.boot_id == boot_id


def _line(text: str) -> str:
    return one_line(text)[:SAID].strip()
