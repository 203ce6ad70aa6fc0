"""Text as `tail -n +1 FILES...` prints it: a line "==> path <==" before each file's content."""

from __future__ import annotations

import re

from health.api import Unreadable

_HEADER = re.compile(r"^==> (\S+) <==$")


def blocks(text: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        match = _HEADER.match(line)
        if match:
            current = found.setdefault(match.group(1), [])
        elif current is None:
            if line.strip():
                raise Unreadable(f"wanted '==> path <==', not {line[:80]!r}")
        else:
            current.append(line)
    if not found:
        raise Unreadable("no file in this text")
    return {path: "\n".join(lines).strip() for path, lines in found.items()}


def integer(text: str, what: str) -> int:
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise Unreadable(f"{what}: {text.strip()[:40]!r} is no whole number")
    return int(text)
