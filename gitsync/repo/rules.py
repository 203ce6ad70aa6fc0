"""Which commits may become a tree: judged from the list of their files, before one byte is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gitsync.repo.listing import Entry


@dataclass(frozen=True, slots=True)
class Limits:
    paths: tuple[str, ...]
    max_bytes: int
    max_file_bytes: int
    max_files: int


REGULAR, LINK, SUBMODULE = 0o10, 0o12, 0o16
# A link's target is a path; the kernel takes no longer one.
LONGEST_LINK = 4096


def allowed(path: str, patterns: Sequence[str]) -> bool:
    """A pattern allows the paths it matches, name by name, and everything below a directory it matches."""
    names = path.split("/")
    for pattern in patterns:
        wanted = pattern.strip("/").split("/")
        if len(names) >= len(wanted) and all(map(fnmatchcase, names, wanted)):
            return True
    return False


def bad_name(path: str) -> str | None:
    """Why a path is not taken. git's own checks refuse most of these; a hostile server need not run them."""
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
            return "it would pose as a repository"
        if len(part.encode()) > 255:
            return "its name is too long"
    return None


def bad_entry(entry: Entry, limits: Limits) -> str | None:
    because = bad_name(entry.path)
    if because:
        return because
    kind, permissions = entry.mode >> 12, entry.mode & 0o7777
    if kind == SUBMODULE:
        return "it is a submodule"
    if kind not in {REGULAR, LINK}:
        return f"its mode {entry.mode:o} is no file's"
    if permissions & 0o7000:
        return f"its mode {entry.mode:o} is setuid, setgid or sticky"
    if not allowed(entry.path, limits.paths):
        return f"it is outside the allowed paths ({', '.join(limits.paths)})"
    if kind == LINK and entry.size > LONGEST_LINK:
        return "it is a symbolic link with no path in it"
    if entry.size > limits.max_file_bytes:
        return f"it is {entry.size} bytes, more than {limits.max_file_bytes} a file"
    return None


def violations(entries: Iterable[Entry], limits: Limits) -> list[str]:
    """Everything wrong with a commit's list of files, worst last: a person mends them in one go."""
    found: list[str] = []
    seen: set[str] = set()
    total = count = 0
    for entry in entries:
        count += 1
        total += entry.size
        because = "it is there twice" if entry.path in seen else bad_entry(entry, limits)
        seen.add(entry.path)
        if because and len(found) < 20:
            found.append(f"{entry.path!r}: {because}")
    # A hostile tree may name a link and a directory alike: what is written "below" the link would land elsewhere.
    for path in seen:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in seen:
                found.append(f"{parent!r}: it is both a file and a directory")
            parent = parent.rpartition("/")[0]
    if count == 0:
        found.append("it holds no file")
    if count > limits.max_files:
        found.append(f"it holds {count} files, more than {limits.max_files}")
    if total > limits.max_bytes:
        found.append(f"it holds {total} bytes, more than {limits.max_bytes}")
    return found
