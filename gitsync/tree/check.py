"""Check a tree before it is published: parse every script, and try its health checks on recorded outputs.

A commit that fails here never reaches a prolog.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gitsync import layout
from gitsync.errors import GitsyncError, RefusedCommit, Stalled
from gitsync.repo import child
from gitsync.repo.reader import CommitFile

# Directories of which the runner executes each file: one that is not executable would drain the node. health.d is not
# among them, because it holds Python modules.
EXECUTED = ("prolog.d", "epilog.d", "task_prolog.d")
SHELLS = frozenset({"sh", "bash", "dash"})
MAX_REPORTED = 10
FIRST_LINE = 256


def read_interpreter(first_line: bytes) -> list[str]:
    """Return the words after `#!`; empty without one."""
    if not first_line.startswith(b"#!"):
        return []
    # Not str.split(): for the kernel a carriage return is part of the interpreter's name.
    words = first_line[2:].split(b"\n")[0].decode(errors="replace").replace("\t", " ").split(" ")
    return [word for word in words if word]


def name_program(words: Sequence[str]) -> str:
    """Name the program that runs a script: `bash` for `/bin/bash -e`, `python3` for `/usr/bin/env -S python3 -I`."""
    if not words:
        return ""
    name = words[0].rpartition("/")[2]
    if name == "env":
        rest = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return rest[0] if rest else "env"
    return name


def detect_language(path: str, words: Sequence[str]) -> str:
    """Return a file's language: `sh`, `bash`, `dash`, `python`, `data`, or empty for one that is not parsed."""
    runs = name_program(words)
    if runs in SHELLS or (not runs and path.endswith((".sh", ".bash"))):
        return runs or "bash"
    if runs.startswith("python") or (not runs and path.endswith(".py")):
        return "python"
    return "data" if path.endswith((".json", ".toml")) else ""


def is_script(path: str) -> bool:
    """Tell whether the runner starts this file: directly in one of its directories, neither hidden nor data."""
    directory, _, name = path.rpartition("/")
    return directory in EXECUTED and layout.is_script(name)


def explain_bad_shape(entry: CommitFile, words: Sequence[str]) -> str | None:
    """Explain what is wrong with a script's first line or mode."""
    if any("\r" in word for word in words):
        return "its first line ends in a carriage return, which the kernel takes for part of the interpreter's name"
    if is_script(entry.path) and not entry.is_executable:
        return "it is not executable (git update-index --chmod=+x)"
    if is_script(entry.path) and entry.is_executable and not words:
        return "it has no #! line to name its interpreter"
    if words and entry.is_executable:
        if not words[0].startswith("/") or shutil.which(words[0], path=child.PATH) is None:
            return f"its interpreter {words[0]} is not on this node"
        if shutil.which(name_program(words), path=child.PATH) is None:
            return f"its interpreter {name_program(words)} is not on this node"
    return None


def read_first_line(path: Path) -> bytes:
    with path.open("rb") as source:
        return source.read(FIRST_LINE)


def check(
    tree: Path,
    entries: Sequence[CommitFile],
    known_good: frozenset[CommitFile],
    commands: Iterable[Sequence[str]],
    timeout: float,
) -> None:
    """Raise RefusedCommit if a script does not parse or a command fails. Skip `known_good` files, which passed."""
    problems: list[str] = []
    shells: dict[str, list[str]] = {}
    python: list[str] = []
    for entry in entries:
        if entry in known_good or entry.is_link:
            continue
        words = read_interpreter(read_first_line(tree / entry.path))
        if reason := explain_bad_shape(entry, words):
            problems.append(f"{entry.path}: {reason}")
        kind = detect_language(entry.path, words)
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
        more = f" (and {len(problems) - MAX_REPORTED} more)" if len(problems) > MAX_REPORTED else ""
        raise RefusedCommit("run the commit's scripts", "; ".join(problems[:MAX_REPORTED]) + more)


def parse_shell(tree: Path, shell: str, paths: Sequence[str], timeout: float) -> list[str]:
    """Parse shell scripts with `SHELL -n`, two at a time under one xargs: three times as fast as one child each."""
    argv = ["xargs", "-0", "-r", "-n", "1", "-P", "2", shell, "-n", "--"]
    names = "\0".join(f"./{path}" for path in paths).encode(errors="surrogateescape")
    done = child.run(argv, timeout=timeout, cwd=tree, stdin=names)
    errors: dict[str, str] = {}
    for line in done.err.splitlines():
        # bash prints "./path: line 3: ...", dash "./path: 3: ..."; report the first error of each file.
        path, _, error = line.strip().removeprefix("./").partition(": ")
        if error and path not in errors:
            errors[path] = error
    if done.status == 0:
        # bash only warns about an unterminated here-document, which is a truncated script.
        errors = {path: error for path, error in errors.items() if "here-document" in error}
    elif not errors:
        errors["one of the scripts"] = f"{shell} -n: {done.err[-300:] or f'xargs ended with {done.status}'}"
    return [f"{path}: {error[:300]}" for path, error in sorted(errors.items())]


def parse_python(tree: Path, paths: Sequence[str], timeout: float) -> list[str]:
    """Compile Python files and parse JSON and TOML in a child; return one line for each broken file."""
    if not paths:
        return []
    argv = [sys.executable, "-I", "-S", str(Path(__file__).with_name("syntax.py"))]
    names = "\0".join(paths).encode(errors="surrogateescape")
    done = child.run(argv, timeout=timeout, cwd=tree, stdin=names)
    errors = done.out.decode(errors="replace").splitlines()
    if done.status == 0:
        return []
    if done.status == 1 and errors:
        return errors
    return [f"one of {len(paths)} Python files ended the compiler with status {done.status}: {done.err[-200:]}"]


def list_standard_commands(tree: Path, entries: Iterable[CommitFile]) -> list[list[str]]:
    """Return the command that tries a tree's health checks on recorded outputs, if the tree has any."""
    if not any(entry.path.startswith(("health.d/", "active.d/")) for entry in entries):
        return []
    if importlib.util.find_spec("health.cli") is None:
        return []
    return [[sys.executable, "-I", "-m", "health.cli", "selftest", str(tree)]]


def dry_run(tree: Path, command: Sequence[str], timeout: float) -> None:
    """Run one checking command; its exit status decides, its last lines are the reason. `{tree}` is the tree's path."""
    argv = [word.replace("{tree}", str(tree)) for word in command]
    env = {"PYTHONDONTWRITEBYTECODE": "1", "MINIVM_SCRIPTS": str(tree)}
    try:
        done = child.run(argv, timeout=timeout, env=env, cwd=tree)
    except Stalled:
        raise
    except GitsyncError as error:
        raise GitsyncError("check the commit", str(error), field="MINIVM_GITSYNC_CHECK_COMMAND") from None
    if done.status != 0:
        lines = [line for line in (done.out.decode(errors="replace") + "\n" + done.err).splitlines() if line.strip()]
        tail = "; ".join(lines[-5:])[-800:] or "it printed nothing"
        raise RefusedCommit("run the commit's checks", f"{Path(argv[0]).name} ended with {done.status}: {tail}")
