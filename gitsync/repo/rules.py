"""Rules for a commit's list of files, checked before the first byte is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gitsync.repo.listing import Entry


@dataclass(frozen=True, slots=True)
class Limits:
    """The allowed paths and sizes of a tree."""

    paths: tuple[str, ...]
    max_bytes: int
    max_file_bytes: int
    max_files: int


REGULAR, LINK, SUBMODULE = 0o10, 0o12, 0o16
# Longest path that the kernel accepts; a link's target is a path.
LONGEST_LINK = 4096
MAX_REPORTED = 20


def allowed(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches the path, name by name, or a directory above it."""
    names = path.split("/")
    for pattern in patterns:
        wanted = pattern.strip("/").split("/")
        if len(names) >= len(wanted) and all(map(fnmatchcase, names, wanted)):
            return True
    return False


def bad_name(path: str) -> str | None:
    """Explain why a path is unacceptable. git's own checks refuse most of these; a hostile server skips them."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        return "its name holds a control character"
    for part in path.split("/"):
        if part in {"", ".", ".."}:
            return "its path leaves the tree"
        if part.lower() == ".git":
            return "its name is reserved for git's own directory"
        if len(part.encode()) > 255:
            return "its name is too long"
    return None


def bad_entry(entry: Entry, limits: Limits) -> str | None:
    """Explain why one file is unacceptable."""
    if reason := bad_name(entry.path):
        return reason
    kind, permissions = entry.mode >> 12, entry.mode & 0o7777
    if kind == SUBMODULE:
        return "it is a submodule"
    if kind not in {REGULAR, LINK}:
        return f"its mode {entry.mode:o} is not that of a file"
    if permissions & 0o7000:
        return f"its mode {entry.mode:o} is setuid, setgid or sticky"
    if not allowed(entry.path, limits.paths):
        return f"it is outside the allowed paths ({', '.join(limits.paths)})"
    if kind == LINK and entry.size > LONGEST_LINK:
        return "it is a symbolic link whose target is too long"
    if entry.size > limits.max_file_bytes:
        return f"it is {entry.size} bytes, more than {limits.max_file_bytes} a file"
    return None


def violations(entries: Iterable[Entry], limits: Limits) -> list[str]:
    """List everything wrong with a commit's files, worst last, so that a person can fix all of it at once."""
    problems: list[str] = []
    seen: set[str] = set()
    total = count = 0
    for entry in entries:
        count += 1
        total += entry.size
        reason = "it is listed twice" if entry.path in seen else bad_entry(entry, limits)
        seen.add(entry.path)
        if reason and len(problems) < MAX_REPORTED:
            problems.append(f"{entry.path!r}: {reason}")
    # A hostile tree may give a link and a directory one name: a file "below" the link would be written elsewhere.
    for path in seen:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in seen:
                problems.append(f"{parent!r}: it is both a file and a directory")
            parent = parent.rpartition("/")[0]
    if count == 0:
        problems.append("it holds no file")
    if count > limits.max_files:
        problems.append(f"it holds {count} files, more than {limits.max_files}")
    if total > limits.max_bytes:
        problems.append(f"it holds {total} bytes, more than {limits.max_bytes}")
    return problems
