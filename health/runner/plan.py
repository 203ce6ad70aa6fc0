"""Plan of a task prolog: the commit's scripts with their deadlines, and the files that the plan depends on.

The task prolog runs as the job's user and asks no daemon (images/src/runner/task_prolog.c). It follows the plan while
each of those files is unchanged; otherwise it determines everything itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gitsync.layout import Layout, commit_of_link, is_script
from ground.files import read_plain, write_whole
from health.places import Places
from health.policy import IN_A_TREE, RunnerPolicy

# Settings of the image's own task prolog scripts, for a program that prints them without a shell.
# Such a script only prints settings (images/src/runner/settings.h). It must match byte for byte, and its settings must
# be plain lines in plain files that every user may read: the script reads as the job's user, this module as root.
# Otherwise the script runs.
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
class TaskSettings:
    # Script to its name in the C program.
    known: dict[str, str]
    # File, name, value.
    rows: list[tuple[str, str, str]]
    # Files that were read or do not exist.
    files: list[str]


NO_SETTINGS = TaskSettings({}, [], [])


def list_setting_files(tree: Path) -> list[str]:
    return [f"{tree}/{name}" for group in FILES.values() for name, _ in group.values()]


def read_settings(tree: Path, scripts: Iterable[str]) -> TaskSettings:
    settings = TaskSettings({}, [], [])
    for script in scripts:
        what, digest = KNOWN.get(script, ("", ""))
        name = f"task_prolog.d/{script}"
        if not what or not _is_open(tree, name, 0o555):
            continue
        if hashlib.blake2b(read_plain(tree / name, MOST_BYTES) or b"", digest_size=20).hexdigest() != digest:
            continue
        parts = [(file, _parse_lines(tree, name, names)) for file, (name, names) in FILES[script].items()]
        rows = [(file, *pair) for file, pairs in parts for pair in pairs or ()]
        if all(pairs is not None for _, pairs in parts):
            settings.known[script] = what
            settings.rows.extend(rows)
            settings.files.extend(f"{tree}/{name}" for name, _ in FILES[script].values())
    return settings


def _parse_lines(tree: Path, name: str, names: re.Pattern[bytes]) -> list[tuple[str, str]] | None:
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
    """Tell if it is a plain file, in plain directories of the tree, with these rights for every user."""
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


KIND = "task_prolog"
# Declared in a script's first lines: without this variable the script has nothing to do for a task and is not started.
ONLY_WITH = b"\n# minivm: only with "


def read_link(layout: Layout) -> str:
    """Return the link's target; "" without a link, which means generation zero."""
    try:
        return os.readlink(layout.current)  # noqa: PTH115  # the text, not a path
    except OSError:
        return ""


def rests_on(places: Places, tree: Path) -> list[str]:
    """List the files that the plan depends on. Strings: building a Path takes longer than a stat, before each job."""
    folder = f"{tree}/{KIND}.d"
    return [
        str(places.policy),
        f"{tree}/{IN_A_TREE}",
        folder,
        *(f"{folder}/{name}" for name in scripts(tree, KIND)),
        *list_setting_files(tree),
    ]


def scripts(tree: Path, kind: str) -> list[str]:
    folder = tree / f"{kind}.d"
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and is_script(entry.name))


def only_with(script: Path) -> str:
    """Return the variable without which the script has nothing to do; "": it runs for every task."""
    try:
        with script.open("rb") as file:
            line = file.read(2048).partition(ONLY_WITH)[2].partition(b"\n")[0].decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return line if line.isidentifier() else ""


def render(
    layout: Layout,
    link: str,
    stamps: Iterable[tuple[str, str]],
    commit: str,
    policy: RunnerPolicy,
    names: Mapping[str, str],
    shell_free: TaskSettings = NO_SETTINGS,
) -> str | None:
    """Render the plan. `names` maps each script to its variable; `shell_free` has the scripts that need no shell.

    Returns None if a name or path contains a separator.
    """
    tree = layout.tree(commit)
    rows = [["link", str(layout.current), link]]
    rows += [["same", path, stamp] for path, stamp in stamps]
    rows += [["commit", commit], ["tree", str(tree)], ["budget", f"{policy.kind(KIND).budget_s * 1000:.0f}"]]
    rows += [["set", *row] for row in shell_free.rows]
    steps = [
        [name, f"{policy.deadline_s(KIND, script) * 1000:.0f}", policy.broken(KIND, script), variable]
        + ([shell_free.known[name]] if name in shell_free.known else [])
        for name, script, variable in ((name, f"{KIND}.d/{name}", variable) for name, variable in names.items())
    ]
    if any(mark in word for row in (*rows, *steps) for word in row for mark in "\t\n\0"):
        return None
    lines = ["minivm task_prolog 2", *map("\t".join, rows), "scripts", *map("\t".join, steps), "end"]
    return "\n".join(lines) + "\n"


def stamp(path: str) -> str:
    """Return a file's identity in the text form that the C program compares."""
    try:
        status = os.stat(path)  # noqa: PTH116  # as above
    except OSError:
        return "-"
    seconds, rest = divmod(status.st_mtime_ns, 10**9)
    return f"{seconds}.{rest:09d}.{status.st_size}.{status.st_ino}"


def write(places: Places, layout: Layout, commit: str, policy: RunnerPolicy) -> None:
    """Write the plan. Stamps come before reads: a file that changes meanwhile makes the plan invalid, never wrong."""
    link = read_link(layout)
    stamps = [(path, stamp(path)) for path in rests_on(places, layout.tree(commit))]
    linked = commit_of_link(link, layout.zero)
    text = None
    # A link to anything else means generation zero too, which the task prolog must determine itself.
    if commit == linked or (not link and layout.tree(commit) == layout.zero):
        tree = layout.tree(commit)
        names = {name: only_with(tree / f"{KIND}.d" / name) for name in scripts(tree, KIND)}
        shell_free = read_settings(tree, names)
        # A site's own script may use other files there, which its users may not read: the plan does not depend on
        # those.
        unread = {*list_setting_files(tree)} - {*shell_free.files}
        stamps = [(path, stamp) for path, stamp in stamps if path not in unread]
        text = render(layout, link, stamps, commit, policy, names, shell_free)
    if text is None:
        places.plan.unlink(missing_ok=True)
    else:
        write_whole(places.plan, text)
