"""The image's own scripts of a task prolog that say settings and nothing else: what they would read, for a program that
says it without a shell (images/src/runner/settings.h).

A script is one of these byte for byte, or is run. So is one whose settings are anything but plain lines of plain files
that everybody may read: the script reads as the job's user, and this as root.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ground.files import read_plain

# What a script is called, as what the program knows it, and the text for which it does.
KNOWN = {
    "10-directories": ("directories", "2eb1abce046193555a19f937c29495a45d464c8f"),
    "20-nccl": ("nccl", "1935cbdfcd4db25a3c4e31fe40ec3c939837bb4b"),
}
# By script, what each of its files is called in a plan, and which names it may set.
ANY = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
NCCL = re.compile(rb"NCCL_[A-Z0-9_]+")
FILES = {
    "10-directories": {"caches": ("lib/caches.env", ANY)},
    "20-nccl": {of: (f"lib/nccl/{of}.env", NCCL) for of in ("ethernet", "infiniband", "roce")},
}
# Otherwise what it reads and writes of a value would not be the value: an equals sign at the end is not read.
VALUE = re.compile(rb"([ -~]*[ -<>-~])?")
# Of four files; beyond it a script reads. The program takes 256 settings.
MOST_BYTES = 4096
MOST_LINES = 64


@dataclass(frozen=True, slots=True)
class Settings:
    # By script, as what the program knows it.
    known: dict[str, str]
    # Of which file, name, value.
    rows: list[tuple[str, str, str]]
    # What was read, or is not there.
    files: list[str]


NONE = Settings({}, [], [])


def files(tree: Path) -> list[str]:
    return [f"{tree}/{name}" for of in FILES.values() for name, _ in of.values()]


def read(tree: Path, scripts: Iterable[str]) -> Settings:
    found = Settings({}, [], [])
    for script in scripts:
        what, digest = KNOWN.get(script, ("", ""))
        name = f"task_prolog.d/{script}"
        if not what or not _is_open(tree, name, 0o555):
            continue
        if hashlib.blake2b(read_plain(tree / name, MOST_BYTES) or b"", digest_size=20).hexdigest() != digest:
            continue
        parts = [(of, _lines(tree, name, names)) for of, (name, names) in FILES[script].items()]
        rows = [(of, *pair) for of, pairs in parts for pair in pairs or ()]
        if all(pairs is not None for _, pairs in parts):
            found.known[script] = what
            found.rows.extend(rows)
            found.files.extend(f"{tree}/{name}" for name, _ in FILES[script].values())
    return found


def _lines(tree: Path, name: str, names: re.Pattern[bytes]) -> list[tuple[str, str]] | None:
    """Names and values as a shell reads them; None where that is the script's to do."""
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
    found = []
    # What no line's end follows is no line.
    for line in text.split(b"\n")[:-1]:
        word, _, value = line.partition(b"=")
        if not names.fullmatch(word):
            continue
        if not VALUE.fullmatch(value):
            return None
        found.append((word.decode(), value.decode()))
    return found if len(found) <= MOST_LINES else None


def _is_open(tree: Path, name: str, mode: int) -> bool:
    """A plain file, in plain directories of the tree, with these rights for everybody."""
    path = tree
    *folders, last = name.split("/")
    try:
        for part in folders:
            path /= part
            found = path.lstat().st_mode
            if not stat.S_ISDIR(found) or found & 0o111 != 0o111:
                return False
        found = (path / last).lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(found) and found & mode == mode
