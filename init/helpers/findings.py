"""What a look at the machine finds: one thing, whether it is as it should be, and a sentence."""

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
