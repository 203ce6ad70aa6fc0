"""Parser of the format of `tail -n +1 FILES...`: a line "==> path <==" before each file's content."""

from __future__ import annotations

import re

from health.api import Unreadable

_HEADER = re.compile(r"^==> (\S+) <==$")


def blocks(text: str) -> dict[str, str]:
    lines_by_path: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        match = _HEADER.match(line)
        if match:
            current = lines_by_path.setdefault(match.group(1), [])
        elif current is None:
            if line.strip():
                raise Unreadable(f"wanted '==> path <==', not {line[:80]!r}")
        else:
            current.append(line)
    if not lines_by_path:
        raise Unreadable("no file in this text")
    return {path: "\n".join(lines).strip() for path, lines in lines_by_path.items()}


def integer(text: str, what: str) -> int:
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise Unreadable(f"{what}: {text.strip()[:40]!r} is not a whole number")
    return int(text)
