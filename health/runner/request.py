r"""Protocol between a client and the resident runner. Pure functions.

    minivm 1 KIND SIZE\n  NAME=VALUE\0 NAME=VALUE\0 ...      (SIZE bytes of it)

A client sends a line and the variables of its environment. The child that will do the run answers "A" and the run's
budget in milliseconds; on the client's "G" it does the run, then sends the exit code and the text to print. No
descriptor is passed: slurmd waits for the end of its pipe, which a hung runner would hold. The other end is
images/src/runner/client.c.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Not the task prolog: it belongs to the user, and no root process runs it.
KINDS = ("prolog", "epilog", "health")
LONGEST_LINE = 64
LONGEST_TEXT = 32 * 1024
MOST = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    kind: str
    environment: Mapping[str, str]


def parse(text: bytes | bytearray) -> Request | None:
    """Parse a request; None while it is incomplete; ValueError for anything that no client of ours sends."""
    line, end, _ = bytes(text[:LONGEST_LINE]).partition(b"\n")
    if not end:
        if len(text) >= LONGEST_LINE:
            raise ValueError("no first line")
        return None
    words = line.decode("ascii").split(" ")
    if len(words) != 4 or words[:2] != ["minivm", "1"] or words[2] not in KINDS or not words[3].isdecimal():
        raise ValueError(f"wanted 'minivm 1 KIND SIZE', not {line!r}")
    size = int(words[3])
    if size > MOST:
        raise ValueError(f"{size} bytes are too many")
    if (left := len(text) - len(line) - 1 - size) < 0:
        return None
    if left:
        raise ValueError("more than was announced")
    variables = bytes(text[len(line) + 1 :]).split(b"\0")
    if variables.pop():
        raise ValueError("the last variable has no end")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return Request(words[2], {name: value for name, equals, value in pairs if name and equals})


def accepted(budget_s: float) -> bytes:
    return b"A" + min(int(budget_s * 1000), 2**31).to_bytes(4, "little")


def ended(code: int, text: bytes) -> bytes:
    """Encode the end of a run with the end of its output."""
    output = text[-LONGEST_TEXT:]
    return bytes([code]) + len(output).to_bytes(2, "little") + output
