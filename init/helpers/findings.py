"""One result of examining the machine: its subject, whether it fits, and a sentence."""

from __future__ import annotations

from init.choices import Choice
from init.records import record


class State(Choice):
    FITS = "fits"
    DIFFERS = "differs"
    NOT_HERE = "not here"


@record(frozen=True, slots=True)
class Finding:
    what: str
    state: State
    text: str
