"""Modules of the standard library by the C half that does their work (docs/decisions/pid-1-start-in-instructions.md).

`signal` turns each number into an enum, and `json` compiles six regular expressions on import: 7 ms before the first
service, for names and checks that PID 1 does not use. `heapq` is implemented again in Python beside its C half. Type
checkers see the real modules.
"""

from __future__ import annotations

__all__ = ["heapq", "read_json", "signal"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import heapq
    import signal
else:
    import _heapq as heapq
    import _signal as signal


def read_json(text: str) -> object:
    """Parse JSON like `json.loads`, which takes over for anything that is not one valid value."""
    from _json import make_scanner

    try:
        value, end = make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]  # typeshed knows one user of it
        if not text[end:].strip():
            return value
    except (StopIteration, ValueError, SystemError):
        pass  # without `json` loaded the scanner cannot report the error and may raise the wrong exception
    from json import loads

    return loads(text)


class _Rules:
    """The decoder attributes that the scanner reads; defaults of `json.JSONDecoder`."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float  # float() reads NaN, Infinity and -Infinity
