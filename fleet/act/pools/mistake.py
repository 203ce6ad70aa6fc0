"""What is wrong in a pool's template, in the words of the API server that refused a pod of it: which field of the
WorkerPool, what was found there, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Its words for: this cannot be read as a pod; and: as a pod it is none.
WRONG = (400, 422)
NAMED = 2
# Letters of what is long: what was found stands at the beginning, what is expected at the end.
BEGINNING, END = 60, 240
# What the template has not written itself.
OURS = ("spec.hostname", "spec.subdomain")
_THEIRS = re.compile(r"(spec|metadata\.(labels|annotations))\b")
# Of what cannot be read older servers name each type on the way, newer ones the path.
_TYPES, _PATH = re.compile(r"\bv1\.\w+\.(\w+):"), re.compile(r"Go struct field \w+\.(\S+) of type")


def to_mend(pool: str, said: str, causes: Sequence[tuple[str, str]]) -> str:
    found = [_words(*cause) for cause in causes[:NAMED]] or [_words(*unread(said))]
    more = [f"and {len(causes) - NAMED} more"] if len(causes) > NAMED else []
    return f"mend the template of WorkerPool {pool}, which the API server refuses: {'; '.join([*found, *more])}"


def unread(said: str) -> tuple[str, str]:
    """Of words about JSON of the wrong type: the field, or nothing where none is named; and what is wrong with it."""
    if named := _PATH.search(said):
        return named[1], said
    types = list(_TYPES.finditer(said))
    if not types:
        return "", said
    # What follows is a piece of the pod, and then a larger one.
    why = said[types[-1].end() :].partition(", bigger context")[0].strip()
    return ".".join(one[1][:1].lower() + one[1][1:] for one in types), why


def _words(field: str, why: str) -> str:
    """A policy names no field."""
    return f"{_short(_place(field), BEGINNING)}: {_short(why)}" if field else _short(why)


def _place(field: str) -> str:
    """In the pool, where a person has written it."""
    ours = field.startswith(OURS) or not _THEIRS.match(field)
    return field if ours else f"spec.template.{field}"


def _short(text: str, end: int = END) -> str:
    return text if len(text) <= BEGINNING + end else f"{text[:BEGINNING]} ... {text[-end:]}"
