"""Three modules of the standard library by the C half that does their work (docs/decisions/the-start-is-counted.md).

`signal` turns each number into an enum, `json` compiles six regular expressions when it is imported: 7 ms before the
first service, for names and checks that PID 1 does not use. `heapq` is written once more in Python, beside its C half.
Type checkers see the real ones.
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
    """What `json.loads` gives. Text that is not one plain value is left to it, whatever it has to say."""
    from _json import make_scanner

    try:
        value, end = make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]  # typeshed knows one user of it
        if not text[end:].strip():
            return value
    except (StopIteration, ValueError, SystemError):
        pass  # it cannot say what is wrong while `json` is not loaded, and may not even raise what it should
    from json import loads

    return loads(text)


class _Rules:
    """What the scanner asks of a decoder; as `json.JSONDecoder` has it by default."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float  # NaN, Infinity and -Infinity are words that float() knows
