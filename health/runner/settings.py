"""Settings of the image's own task prolog scripts, for a program that prints them without a shell.

Such a script only prints settings (images/src/runner/settings.h). It must match byte for byte, and its settings must be
plain lines in plain files that everybody may read: the script reads as the job's user, this module as root. Otherwise
the script runs.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ground.files import read_plain

# Each script's name in the C program, and the digest of the text for which that holds.
KNOWN = {
    "10-directories": ("directories", "0906ef87a0007bcfcad1b378cf4a8834f34fa78b"),
    "20-nccl": ("nccl", "1935cbdfcd4db25a3c4e31fe40ec3c939837bb4b"),
}
# For each script, the plan's name of each file and the names that the file may set.
ANY = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
NCCL = re.compile(rb"NCCL_[A-Z0-9_]+")
FILES = {
    "10-directories": {"caches": ("lib/caches.env", ANY)},
    "20-nccl": {of: (f"lib/nccl/{of}.env", NCCL) for of in ("ethernet", "infiniband", "roce")},
}
# Values outside this pattern would change between reading and printing: a trailing equals sign is not read.
VALUE = re.compile(rb"([ -~]*[ -<>-~])?")
# Limits of one file; beyond them the script runs. The program takes 256 settings.
MOST_BYTES = 4096
MOST_LINES = 64


@dataclass(frozen=True, slots=True)
class Settings:
    # Script to its name in the C program.
    known: dict[str, str]
    # File, name, value.
    rows: list[tuple[str, str, str]]
    # Files that were read or do not exist.
    files: list[str]


NONE = Settings({}, [], [])


def files(tree: Path) -> list[str]:
    return [f"{tree}/{name}" for group in FILES.values() for name, _ in group.values()]


def read(tree: Path, scripts: Iterable[str]) -> Settings:
    settings = Settings({}, [], [])
    for script in scripts:
        what, digest = KNOWN.get(script, ("", ""))
        name = f"task_prolog.d/{script}"
        if not what or not _is_open(tree, name, 0o555):
            continue
        if hashlib.blake2b(read_plain(tree / name, MOST_BYTES) or b"", digest_size=20).hexdigest() != digest:
            continue
        parts = [(file, _lines(tree, name, names)) for file, (name, names) in FILES[script].items()]
        rows = [(file, *pair) for file, pairs in parts for pair in pairs or ()]
        if all(pairs is not None for _, pairs in parts):
            settings.known[script] = what
            settings.rows.extend(rows)
            settings.files.extend(f"{tree}/{name}" for name, _ in FILES[script].values())
    return settings


def _lines(tree: Path, name: str, names: re.Pattern[bytes]) -> list[tuple[str, str]] | None:
    """Parse names and values as a shell does; None if only the script can."""
    path = tree / name
    try:
        path.lstat()
    except FileNotFoundError:
        return []
    except OSError:
        return None
    text = read_plain(path, MOST_BYTES + 1) if _is_open(tree, name, 0o444) else None
    if text is None or len(text) > MOST_BYTES or b"\0" in text:
        return None
    pairs = []
    # A line without an end is no line.
    for line in text.split(b"\n")[:-1]:
        word, _, value = line.partition(b"=")
        if not names.fullmatch(word):
            continue
        if not VALUE.fullmatch(value):
            return None
        pairs.append((word.decode(), value.decode()))
    return pairs if len(pairs) <= MOST_LINES else None


def _is_open(tree: Path, name: str, mode: int) -> bool:
    """Tell if it is a plain file, in plain directories of the tree, with these rights for everybody."""
    path = tree
    *folders, last = name.split("/")
    try:
        for part in folders:
            path /= part
            file_mode = path.lstat().st_mode
            if not stat.S_ISDIR(file_mode) or file_mode & 0o111 != 0o111:
                return False
        file_mode = (path / last).lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(file_mode) and file_mode & mode == mode
