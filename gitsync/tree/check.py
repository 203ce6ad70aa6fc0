"""Would it run: every script of a tree that is about to be published is parsed, and its health checks are tried on
recorded outputs. What fails here never reaches a prolog."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gitsync import layout
from gitsync.errors import GitsyncError, Refused, Stalled
from gitsync.repo import child
from gitsync.repo.listing import Entry

# What the runner executes: a file here that cannot be executed is a node that drains. (health.d holds modules.)
EXECUTED = ("prolog.d", "epilog.d", "task_prolog.d")
SHELLS = frozenset({"sh", "bash", "dash"})
MOST_REPORTED = 10
FIRST_LINE = 256


def interpreter(first_line: bytes) -> list[str]:
    """The words after `#!`; empty without one."""
    if not first_line.startswith(b"#!"):
        return []
    # Not str.split(): a carriage return is part of the name that the kernel looks for.
    words = first_line[2:].split(b"\n")[0].decode(errors="replace").replace("\t", " ").split(" ")
    return [word for word in words if word]


def program(words: Sequence[str]) -> str:
    """What runs the script: `bash` for `/bin/bash -e`, `python3` for `/usr/bin/env -S python3 -I`."""
    if not words:
        return ""
    name = words[0].rpartition("/")[2]
    if name == "env":
        rest = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return rest[0] if rest else "env"
    return name


def language(path: str, words: Sequence[str]) -> str:
    """`sh`, `bash`, `python`, `data` or nothing we can parse."""
    runs = program(words)
    if runs in SHELLS or (not runs and path.endswith((".sh", ".bash"))):
        return runs or "bash"
    if runs.startswith("python") or (not runs and path.endswith(".py")):
        return "python"
    return "data" if path.endswith((".json", ".toml")) else ""


def is_script(path: str) -> bool:
    """Whether the runner would start it: directly in one of its directories, neither hidden nor data."""
    directory, _, name = path.rpartition("/")
    return directory in EXECUTED and layout.is_script(name)


def shape(entry: Entry, words: Sequence[str]) -> str | None:
    """What is wrong with a script before it is parsed."""
    if any("\r" in word for word in words):
        return "its first line ends in a carriage return: no interpreter has such a name"
    if is_script(entry.path) and not entry.is_executable:
        return "it is not executable (git update-index --chmod=+x)"
    if is_script(entry.path) and entry.is_executable and not words:
        return "it has no #! line, so what runs it is a matter of chance"
    if words and entry.is_executable:
        found = shutil.which(words[0], path=child.PATH) if words[0].startswith("/") else None
        if found is None:
            return f"its interpreter {words[0]} is not on this node"
        if shutil.which(program(words), path=child.PATH) is None:
            return f"its interpreter {program(words)} is not on this node"
    return None


def first_line(path: Path) -> bytes:
    with path.open("rb") as source:
        return source.read(FIRST_LINE)


def check(
    tree: Path,
    entries: Sequence[Entry],
    known_good: frozenset[Entry],
    commands: Iterable[Sequence[str]],
    timeout: float,
) -> None:
    """Refused with what is broken. `known_good` are files that passed in an earlier tree: not looked at again."""
    problems: list[str] = []
    shells: dict[str, list[str]] = {}
    python: list[str] = []
    for entry in entries:
        if entry in known_good or entry.is_link:
            continue
        words = interpreter(first_line(tree / entry.path))
        because = shape(entry, words)
        if because:
            problems.append(f"{entry.path}: {because}")
        kind = language(entry.path, words)
        if kind in SHELLS:
            shells.setdefault(kind, []).append(entry.path)
        elif kind:
            python.append(entry.path)
    for shell, paths in shells.items():
        problems += parse_shell(tree, shell, paths, timeout)
    problems += parse_python(tree, python, timeout)
    _refuse(problems)
    for command in commands:
        dry_run(tree, command, timeout)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f" (and {len(problems) - MOST_REPORTED} more)" if len(problems) > MOST_REPORTED else ""
        raise Refused("run the commit's scripts", "; ".join(problems[:MOST_REPORTED]) + more)


def parse_shell(tree: Path, shell: str, paths: Sequence[str], timeout: float) -> list[str]:
    """A shell a file, two at a time, under one xargs: starting each from here would cost three times as much."""
    argv = ["xargs", "-0", "-r", "-n", "1", "-P", "2", shell, "-n", "--"]
    asked = "\0".join(f"./{path}" for path in paths).encode(errors="surrogateescape")
    done = child.run(argv, timeout=timeout, cwd=tree, stdin=asked)
    said: dict[str, str] = {}
    for line in done.err.splitlines():
        # bash says "./path: line 3: ...", dash "./path: 3: ..."; the first complaint about a file is the one to mend.
        path, _, complaint = line.strip().removeprefix("./").partition(": ")
        if complaint and path not in said:
            said[path] = complaint
    if done.status == 0:
        # An open here-document is only a warning to bash, and half a script to us.
        said = {path: complaint for path, complaint in said.items() if "here-document" in complaint}
    elif not said:
        said["one of the scripts"] = f"{shell} -n: {done.err[-300:] or f'xargs ended with {done.status}'}"
    return [f"{path}: {complaint[:300]}" for path, complaint in sorted(said.items())]


def parse_python(tree: Path, paths: Sequence[str], timeout: float) -> list[str]:
    if not paths:
        return []
    argv = [sys.executable, "-I", "-S", str(Path(__file__).with_name("syntax.py"))]
    asked = "\0".join(paths).encode(errors="surrogateescape")
    done = child.run(argv, timeout=timeout, cwd=tree, stdin=asked)
    said = done.out.decode(errors="replace").splitlines()
    if done.status == 0:
        return []
    if done.status == 1 and said:
        return said
    return [f"one of {len(paths)} Python files ends the compiler with status {done.status}: {done.err[-200:]}"]


def standard_commands(tree: Path, entries: Iterable[Entry]) -> list[list[str]]:
    """The dry run of a tree's health checks against its recorded outputs, where it has any."""
    if not any(entry.path.startswith("health.d/") for entry in entries):
        return []
    if importlib.util.find_spec("health.cli") is None:
        return []
    return [[sys.executable, "-I", "-m", "health.dry_run", str(tree)]]


def dry_run(tree: Path, command: Sequence[str], timeout: float) -> None:
    """One checking command; its exit status decides, its last words are the reason. `{tree}` stands for the tree."""
    argv = [word.replace("{tree}", str(tree)) for word in command]
    env = {"PYTHONDONTWRITEBYTECODE": "1", "MINIVM_SCRIPTS": str(tree)}
    try:
        done = child.run(argv, timeout=timeout, env=env, cwd=tree)
    except Stalled:
        raise
    except GitsyncError as error:
        raise GitsyncError("check the commit", str(error), field="MINIVM_GITSYNC_CHECK_COMMAND") from None
    if done.status != 0:
        words = [line for line in (done.out.decode(errors="replace") + "\n" + done.err).splitlines() if line.strip()]
        tail = "; ".join(words[-5:])[-800:] or "no word"
        raise Refused("run the commit's checks", f"{Path(argv[0]).name} ended with {done.status}: {tail}")
